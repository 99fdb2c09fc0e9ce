"""The HTTP control API: the only part of the daemon that imports fastapi, uvicorn and pydantic."""
