"use strict";
// Elements and words: everything that is shown is put in as text, never as markup.

const byId = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Sets text only where it differs: a screen reader reads a live region again for each change. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Rebuilds an element's children when what they show has changed. */
const shown = new WeakMap();
function rebuild(element, value, build) {
  const key = JSON.stringify(value);
  if (shown.get(element) === key) return;
  shown.set(element, key);
  element.replaceChildren(...build());
}

const number = (value) => Math.round(value).toLocaleString("en-US");
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 0.0005) return "under 1 ms";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** The time of a day, with the day unless it is today. */
function moment(seconds) {
  const date = new Date(seconds * 1000);
  return date.toDateString() === new Date().toDateString() ? date.toLocaleTimeString() : date.toLocaleString();
}

/** Pairs of term and text as the children of a dl; those without a text are left out. */
const facts = (pairs) =>
  pairs
    .filter(([, text]) => text !== null && text !== undefined && text !== "")
    .flatMap(([term, text]) => [make("dt", { textContent: term }), make("dd", { textContent: String(text) })]);
