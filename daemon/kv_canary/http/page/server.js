// The server: reads, writes with the token, and the stream of incidents.

let token = null; // of this tab, in memory only

class Refusal extends Error {
  constructor(status, detail, ours) {
    super(detail);
    this.status = status;
    this.ours = ours; // said by the canary, not by something in between
  }
}

async function call(method, path, body) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (method !== "GET" && token !== null) headers.Authorization = `Bearer ${token}`;
  const answer = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "same-origin",
    signal: AbortSignal.timeout(method === "GET" ? 6000 : 12000),
  });
  const text = await answer.text();
  const ours = /json/.test(answer.headers.get("Content-Type") || "");
  const found = ours ? JSON.parse(text) : null;
  if (!answer.ok)
    throw new Refusal(answer.status, found?.detail || `the server answered ${answer.status}`, Boolean(found?.detail));
  call.now = Date.parse(answer.headers.get("Date")) / 1000 || Date.now() / 1000; // the server's clock, not this one's
  return found;
}

const read = (path) => call("GET", path);

/** A write. Where a token is missing or wrong it is asked for; null when nobody gives one. */
async function write(method, path, body) {
  for (;;) {
    try {
      return await call(method, path, body);
    } catch (refusal) {
      // A 403 of the canary says what no token would change; one of a proxy before it may be about the token.
      const isAboutToken = refusal.status === 401 || (refusal.status === 403 && !refusal.ours);
      if (!isAboutToken) throw refusal;
      token = await askForToken(token === null ? "This server takes changes only with its token." : refusal.message);
      if (token === null) return null;
    }
  }
}

function askForToken(why) {
  const dialog = byId("token-dialog"),
    form = byId("token-form"),
    input = byId("token"),
    cancel = byId("token-cancel");
  say(byId("token-why"), why);
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((answer) => {
    let given = null;
    const submit = (event) => {
      event.preventDefault();
      given = input.value.trim() || null;
      dialog.close();
    };
    const dismiss = () => dialog.close();
    form.addEventListener("submit", submit);
    cancel.addEventListener("click", dismiss);
    dialog.addEventListener(
      "close",
      () => {
        form.removeEventListener("submit", submit);
        cancel.removeEventListener("click", dismiss);
        input.value = "";
        answer(given);
      },
      { once: true },
    );
  });
}

/** New incidents as they come. A server with too many streams refuses: until it is asked again, the status says more. */
const stream = {
  source: null,
  openedAt: -Infinity,
  open(after, take) {
    const isOpen = this.source && this.source.readyState !== EventSource.CLOSED;
    if (isOpen || performance.now() < this.openedAt + 15000) return;
    this.openedAt = performance.now();
    const query = after ? `?after=${encodeURIComponent(after)}` : "";
    this.source = new EventSource(`/v1/incidents/stream${query}`);
    this.source.addEventListener("incident", (event) => take(JSON.parse(event.data)));
  },
  close() {
    this.source?.close();
    this.source = null;
    this.openedAt = -Infinity;
  },
};
