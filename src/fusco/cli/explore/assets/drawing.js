// Canvases that follow the page's width and colours, their axes, and the box that says what is under the pointer.

/** @typedef {{width: number, height: number}} Extent */
/** @typedef {(context: CanvasRenderingContext2D, width: number, height: number) => void} Draw */
/**
 * @typedef {object} Picture
 * @property {HTMLElement} box
 * @property {HTMLCanvasElement} canvas
 * @property {() => void} redraw
 */

const FONT =
  "12px Inter, ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'Noto Sans', Arial, sans-serif";
/** @type {Set<() => void>} */
const redraws = new Set();
isDark.addEventListener("change", () => redraws.forEach((redraw) => redraw()));

/**
 * Make a canvas that fills its place and is drawn anew when that, or the colours, change.
 * @param {string} name what a screen reader says, with the numbers that matter
 * @param {(width: number) => number} height
 * @param {Draw} draw
 * @returns {Picture}
 */
function picture(name, height, draw) {
  const canvas = el("canvas", { role: "img", "aria-label": name });
  const box = el("div", { class: "picture" }, canvas);
  let last = 0;
  const redraw = () => {
    const width = Math.floor(box.clientWidth);
    if (!width) return;
    const tall = Math.round(height(width));
    const scale = Math.min(3, window.devicePixelRatio || 1);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${tall}px`;
    const context = canvas.getContext("2d");
    if (!context) return;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = FONT;
    context.textBaseline = "middle";
    draw(context, width, tall);
  };
  new ResizeObserver(() => {
    if (box.clientWidth !== last) {
      last = box.clientWidth;
      redraw();
    }
  }).observe(box);
  redraws.add(redraw);
  return { box, canvas, redraw };
}

const tip = el("div", { class: "tip", "aria-hidden": "true", hidden: true });

/**
 * Say what is under the pointer.
 * @param {HTMLCanvasElement} canvas
 * @param {(x: number, y: number) => string} text empty for nothing
 */
function explain(canvas, text) {
  const hide = () => tip.setAttribute("hidden", "");
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("pointermove", (event) => {
    const at = canvas.getBoundingClientRect();
    const said = text(event.clientX - at.left, event.clientY - at.top);
    if (!said) return hide();
    tip.textContent = said;
    tip.removeAttribute("hidden");
    const { offsetWidth: width, offsetHeight: height } = tip;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + height + 22 > innerHeight ? event.clientY - height - 10 : event.clientY + 16}px`;
  });
}

/**
 * Return round numbers from 0 to a limit, at most `count` of them and the 0.
 * @param {number} limit @param {number} count
 */
function ticks(limit, count) {
  if (!(limit > 0)) return [0];
  const power = 10 ** Math.floor(Math.log10(limit / count));
  const step = power * ([1, 2, 5, 10].find((each) => limit / (power * each) <= count) ?? 10);
  return range(Math.floor(limit / step + 1e-9) + 1).map((i) => Number((i * step).toPrecision(12)));
}

/**
 * Return every how many of a number of cells an axis has a label.
 * @param {number} cell pixels of a cell @param {number} unit a natural number of cells, such as a node's ranks
 * @param {number} room pixels of a label
 */
function labelStep(cell, unit, room) {
  let step = cell >= room ? 1 : unit;
  while (step * cell < room) step *= 2;
  return step;
}

/**
 * Write a text.
 * @param {CanvasRenderingContext2D} context
 * @param {string} text @param {number} x @param {number} y
 * @param {CanvasTextAlign} [align] @param {string} [ink]
 */
function write(context, text, x, y, align = "left", ink = colour("muted")) {
  context.fillStyle = ink;
  context.textAlign = align;
  context.fillText(text, x, y);
}

/**
 * Draw a straight line.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x0 @param {number} y0 @param {number} x1 @param {number} y1
 * @param {string} ink @param {number} [width] @param {number[]} [dashes]
 */
function line(context, x0, y0, x1, y1, ink, width = 1, dashes = []) {
  context.strokeStyle = ink;
  context.lineWidth = width;
  context.setLineDash(dashes);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.setLineDash([]);
}
