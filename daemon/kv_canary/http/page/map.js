// The page map: one rectangle a cell, painted as an image of one pixel a cell and then enlarged, so that tens of
// thousands of cells cost as little as a hundred.

const NO_AGE = 7,
  DRILLED = 64,
  MISMATCHED = 128,
  MARK_LIMIT = 3000;

const STATE_WORDS = {
  elsewhere: "of another group now",
  free: "free",
  sealed: "complete",
  open: "being written",
  loading: "being loaded",
  unknown: "unknown",
};

class PageMap {
  constructor(canvas, { choose, look }) {
    this.canvas = canvas;
    this.choose = choose; // a cell is pointed at: its index
    this.look = look; // a cell is asked for: its index
    this.map = null;
    this.cells = new Uint8Array(0);
    this.chosen = null;
    this.position = null;
    this.pointer = null; // where it was last, on the screen
    this.layout = { columns: 1, size: 1, scale: 1 };
    this.small = document.createElement("canvas");
    new ResizeObserver(() => this.paint()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    canvas.addEventListener("pointermove", (event) => {
      // What moves under a resting pointer must not take over from the keyboard.
      const here = `${event.screenX} ${event.screenY}`,
        hasMoved = this.pointer !== null && this.pointer !== here;
      this.pointer = here;
      if (hasMoved) this.point(this.at(event));
    });
    canvas.addEventListener("click", (event) => {
      this.point(this.at(event));
      this.ask();
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(map, position) {
    if (!this.map || map.group !== this.map.group || map.pages !== this.map.pages) this.chosen = null;
    this.map = map;
    this.position = position;
    const text = atob(map.cells);
    this.cells = Uint8Array.from(text, (character) => character.charCodeAt(0));
    this.paint();
  }

  /** The first and last page of a cell. */
  pages(index) {
    const first = this.map.first_page + index * this.map.pages_per_cell;
    return [first, Math.min(first + this.map.pages_per_cell, this.map.first_page + this.map.pages) - 1];
  }

  cell(page) {
    const index = Math.floor((page - this.map.first_page) / this.map.pages_per_cell);
    return page >= this.map.first_page && index < this.cells.length ? index : null;
  }

  state(index) {
    return this.map.states[(this.cells[index] >> 3) & 7];
  }

  words(index) {
    const age = this.cells[index] & 7,
      bounds = this.map.age_bounds_seconds.map(duration),
      state = this.state(index);
    const isKept = state === "sealed" || state === "free";
    const when =
      age === NO_AGE
        ? isKept
          ? ", not verified yet"
          : ""
        : age < bounds.length
          ? `, verified in the last ${bounds[age]}`
          : `, not verified for ${bounds.at(-1)} or more`;
    const found = this.cells[index] & MISMATCHED ? ", MISMATCH" : this.cells[index] & DRILLED ? ", drilled" : "";
    return STATE_WORDS[state] + when + found;
  }

  // Choosing

  at(event) {
    const box = this.canvas.getBoundingClientRect(),
      { columns, size, scale } = this.layout;
    const column = Math.floor(((event.clientX - box.left) * scale) / size);
    const row = Math.floor(((event.clientY - box.top) * scale) / size);
    const index = row * columns + column;
    return column >= 0 && column < columns && index >= 0 && index < this.cells.length ? index : null;
  }

  point(index) {
    if (index === null || index === this.chosen) return;
    this.chosen = index;
    this.paint();
    this.choose(index);
  }

  ask() {
    if (this.chosen !== null) this.look(this.chosen);
  }

  key(event) {
    const last = this.cells.length - 1,
      now = this.chosen ?? -1,
      { columns } = this.layout;
    const steps = {
      ArrowRight: now + 1,
      ArrowLeft: now - 1,
      ArrowDown: now < 0 ? 0 : now + columns,
      ArrowUp: now - columns,
      PageDown: now + 10 * columns,
      PageUp: now - 10 * columns,
      Home: 0,
      End: last,
    };
    if (event.ctrlKey || event.altKey || event.metaKey || last < 0) return;
    if (event.key === "Enter" || event.key === " ") this.ask();
    else if (event.key === "m" || event.key === "M") this.point(this.nextMismatch(now));
    else if (event.key in steps) this.point(Math.max(0, Math.min(last, steps[event.key])));
    else return;
    event.preventDefault();
  }

  nextMismatch(from) {
    for (let step = 1; step <= this.cells.length; step += 1) {
      const index = (from + step) % this.cells.length;
      if (this.cells[index] & MISMATCHED) return index;
    }
    return null;
  }

  // Painting

  /** The largest cells with which all of them fit into the width and a third of the screen. */
  fit(count) {
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.floor(this.canvas.parentElement.clientWidth * scale));
    const height = Math.max(160, Math.min(360, innerHeight * 0.4)) * scale;
    for (let size = Math.floor(22 * scale); ; size -= 1) {
      const columns = Math.max(1, Math.floor(width / size));
      if (size <= 1 || Math.ceil(count / columns) * size <= height) return { columns, size, scale };
    }
  }

  /** RGBA of every byte that a cell may have, from the page's own colours. */
  palette() {
    const style = getComputedStyle(document.documentElement),
      colours = new Uint32Array(256);
    const colour = (name) => {
      const hex = style.getPropertyValue(`--${name}`).trim();
      return (
        (0xff000000 |
          (parseInt(hex.slice(5, 7), 16) << 16) |
          (parseInt(hex.slice(3, 5), 16) << 8) |
          parseInt(hex.slice(1, 3), 16)) >>>
        0
      );
    };
    this.map.states.forEach((state, place) => {
      for (let age = 0; age < 8; age += 1) {
        const name =
          state === "sealed" || state === "free" ? `${state}-${age === NO_AGE ? 7 : Math.min(age, 4)}` : state;
        colours[(place << 3) | age] = colours[(place << 3) | age | DRILLED] = colour(name);
      }
    });
    return colours.fill(colour("mismatch"), MISMATCHED);
  }

  paint() {
    if (!this.map || !this.cells.length) return;
    const { columns, size, scale } = (this.layout = this.fit(this.cells.length));
    const rows = Math.ceil(this.cells.length / columns),
      canvas = this.canvas,
      context = canvas.getContext("2d");
    const palette = this.palette(),
      style = getComputedStyle(document.documentElement);
    this.small.width = columns;
    this.small.height = rows;
    const image = new ImageData(columns, rows),
      pixels = new Uint32Array(image.data.buffer);
    for (let index = 0; index < this.cells.length; index += 1) pixels[index] = palette[this.cells[index]];
    this.small.getContext("2d").putImageData(image, 0, 0);
    canvas.width = columns * size;
    canvas.height = rows * size;
    canvas.style.width = `${(columns * size) / scale}px`;
    canvas.style.height = `${(rows * size) / scale}px`;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, 0, 0, columns * size, rows * size);
    if (size >= 5 * scale) {
      const gap = Math.max(1, Math.round(scale));
      for (let column = 1; column <= columns; column += 1) context.clearRect(column * size - gap, 0, gap, rows * size);
      for (let row = 1; row <= rows; row += 1) context.clearRect(0, row * size - gap, columns * size, gap);
    }
    const swept = this.position === null ? null : this.cell(this.position);
    if (swept !== null) this.ring(context, swept, style.getPropertyValue("--cursor"), 1);
    let marks = 0;
    for (let index = 0; index < this.cells.length && marks < MARK_LIMIT; index += 1) {
      if (this.cells[index] < DRILLED) continue;
      marks += 1;
      if (this.cells[index] & MISMATCHED) this.spot(context, index, style);
      else this.ring(context, index, style.getPropertyValue("--drill"), 2);
    }
    if (this.chosen !== null) this.ring(context, this.chosen, style.getPropertyValue("--cursor"), 2, 13);
  }

  /** A mismatch: the cell, or a square around it where cells are too small to be seen, in red with an edge. */
  spot(context, index, style) {
    const { columns, size, scale } = this.layout,
      side = Math.max(size, 9 * scale);
    const left = (index % columns) * size + size / 2 - side / 2,
      top = Math.floor(index / columns) * size + size / 2 - side / 2;
    context.fillStyle = style.getPropertyValue("--card");
    context.fillRect(left, top, side, side);
    context.fillStyle = style.getPropertyValue("--mismatch");
    context.fillRect(left + scale, top + scale, side - 2 * scale, side - 2 * scale);
  }

  /** A frame around a cell, large enough to be seen where cells are a pixel. */
  ring(context, index, colour, thickness, least = 7) {
    const { columns, size, scale } = this.layout,
      side = Math.max(size, least * scale),
      width = thickness * scale;
    const left = (index % columns) * size + size / 2 - side / 2,
      top = Math.floor(index / columns) * size + size / 2 - side / 2;
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(left + width / 2, top + width / 2, side - width, side - width);
  }
}
