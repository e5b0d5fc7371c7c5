// Shared by all views: elements, numbers, colours, tables. All scripts of the page are one, in the order of views.py.
"use strict";

/** @typedef {{anchor: string, question: string, title: string, reading: string}} View */
/** @typedef {string | number | Node} Child */
/** @typedef {{value: number, text: string}} Figure a number in a table, as it is in the JSON and as it is shown */

/**
 * Make an element of HTML.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number | boolean>} [attributes] those that are false are left out
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

/** @param {string} id @returns {HTMLElement} */
function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/** Show three digits, or all of an integer. @param {number} value */
function digits(value) {
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

/** Show three digits, also of an integer. @param {number} value */
function short(value) {
  return digits(Number(value.toPrecision(3)));
}

/**
 * Show a value with the largest unit of which it has at least one.
 * @param {number} value
 * @param {[string, number][]} units the largest first
 */
function withUnit(value, units) {
  const [unit, size] = units.find(([, each]) => value >= each) ?? units[units.length - 1];
  return `${short(value / size)} ${unit}`;
}

/** @param {number} microseconds */
function time(microseconds) {
  return withUnit(microseconds, [
    ["s", 1e6],
    ["ms", 1e3],
    ["us", 1],
  ]);
}

/** @param {number} bytes */
function size(bytes) {
  return withUnit(bytes, [
    ["TB", 1e12],
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
    ["B", 1],
  ]);
}

/** @param {number} value @returns {Figure} */
function figure(value, text = digits(value)) {
  return { value, text };
}

/** @param {ArrayLike<number>} values */
function sum(values) {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i];
  return total;
}

/** Return the largest value, at least 0; Math.max has a limit of arguments. @param {ArrayLike<number>} values */
function most(values) {
  let largest = 0;
  for (let i = 0; i < values.length; i++) if (values[i] > largest) largest = values[i];
  return largest;
}

/** Return the numbers from 0. @param {number} count */
function range(count) {
  return Array.from({ length: count }, (_, i) => i);
}

// --- colours

const isDark = matchMedia("(prefers-color-scheme: dark)");
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

/** A colour of the style sheet, such as "ink". @param {string} name */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/**
 * Convert OKLCH to sRGB: lightness 0 to 1, chroma, hue in degrees. Source: Bjoern Ottosson, "A perceptual color space".
 * @param {number} lightness @param {number} chroma @param {number} hue
 * @returns {[number, number, number]} 0 to 255
 */
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  const encode = (/** @type {number} */ x) => (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
  const [red, green, blue] = linear.map((x) => Math.round(255 * encode(Math.min(1, Math.max(0, x)))));
  return [red, green, blue];
}

/** The colour of a share from 0 to 1: lightness is linear in it. @param {number} share */
function heat(share) {
  const t = Math.min(1, Math.max(0, share));
  const chroma = 0.01 + 0.254 * t * (1.236 - t);
  return isDark.matches ? oklch(0.26 + 0.66 * t, chroma, 268 - 85 * t) : oklch(0.975 - 0.67 * t, chroma, 215 + 58 * t);
}

/** One of several colours of equal lightness. @param {number} i @param {number} count */
function hueOf(i, count) {
  const [red, green, blue] = oklch(isDark.matches ? 0.72 : 0.62, 0.11, 250 + (360 * i) / Math.max(1, count));
  return `rgb(${red} ${green} ${blue})`;
}

/** The legend of `heat`: a ramp above texts at equal distances. @param {...string} texts */
function ramp(...texts) {
  const bar = el("i", { class: "ramp" });
  const paint = () => {
    const stops = range(9).map((i) => `rgb(${heat(i / 8).join(" ")})`);
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  };
  paint();
  isDark.addEventListener("change", paint);
  const marks = texts.map((text) => el("span", {}, text));
  return el("span", { class: "ramp-and-marks" }, bar, el("span", { class: "marks" }, ...marks));
}

/** A word of a legend. @param {string} text @param {string} style of the swatch @param {string} [kind] */
function swatch(text, style, kind = "") {
  return el("span", {}, el("i", { class: `swatch ${kind}`, style }), text);
}

// --- tables

const MAX_TABLE_ROWS = 1024;

/**
 * Make a table with the numbers of a picture, closed at first and filled when it is opened.
 * @param {View} view
 * @param {string} caption
 * @param {() => {head: string[], rows: (string | Figure)[][]}} content
 */
function numbers(view, caption, content) {
  const place = el("div", {
    class: "scroll",
    tabindex: 0,
    role: "region",
    "aria-label": `${view.question} ${caption}`,
  });
  const whole = el("details", {}, el("summary", {}, "The numbers as a table"), place);
  whole.addEventListener("toggle", () => {
    if (whole.open && !place.firstChild) place.append(table(caption, content()));
  });
  return whole;
}

/**
 * @param {string} caption
 * @param {{head: string[], rows: (string | Figure)[][], classes?: string[]}} content
 */
function table(caption, { head, rows, classes = [] }) {
  const shown = rows.slice(0, MAX_TABLE_ROWS);
  const rest = rows.length > shown.length ? ` The first ${digits(shown.length)} of ${digits(rows.length)} rows.` : "";
  const body = el("tbody");
  shown.forEach((cells, i) => {
    const row = el("tr", { class: classes[i] ?? false });
    cells.forEach((cell, j) => {
      const content = typeof cell === "string" ? cell : el("data", { value: cell.value }, cell.text);
      row.append(
        j ? el("td", { class: typeof cell === "string" && "words" }, content) : el("th", { scope: "row" }, content),
      );
    });
    body.append(row);
  });
  const titles = head.map((each, i) =>
    el("th", { scope: "col", class: typeof rows[0]?.[i] === "string" && "words" }, each),
  );
  return el("table", {}, el("caption", {}, caption + rest), el("thead", {}, el("tr", {}, ...titles)), body);
}
