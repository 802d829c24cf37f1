"use strict";
/* The explorer page: one trace, seven views, one selection. No library, no network.

   A view draws into a Picture, a list of shapes, which becomes a canvas on the page, a PNG or an
   SVG. What can be reached in it is a button over the canvas, or a field of cells for the mouse
   that the selectors above reach, too. Text gets into the page as text only. */
(() => {
const KINDS = ["cross", "encoder", "decoder"];
const MASKED = 65535, FINE = 65534 / 32, FINE_END = Math.floor(24 * FINE + 0.5), COARSE = 128; // explorer.py
const LINES_UP_TO = 24; // tokens on a side that are joined by lines; more are two shaded texts
const SANS = getComputedStyle(document.documentElement).getPropertyValue("--sans").trim() || "sans-serif";
const $ = (id) => document.getElementById(id);
const header = JSON.parse($("trace").textContent);
const reads = header.read, writes = header.write, source = header.source;
const vocabulary = new Map(header.vocabulary.map((token) => [token.id, token]));
let bytes;

// ---------------------------------------------------------------- numbers

const TYPES = { u2: Uint16Array, i2: Int16Array, i4: Int32Array, f4: Float32Array };
const arrays = new Map();

function array(name) {
  if (!arrays.has(name)) {
    const entry = header.arrays[name];
    if (!entry) return null;
    const [type, shape, first] = entry;
    const size = shape.reduce((a, b) => a * b, 1);
    arrays.set(name, { shape, data: new TYPES[type](bytes, first, size) });
  }
  return arrays.get(name);
}

async function unpack() {
  const text = atob($("data").textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  bytes = await new Response(stream).arrayBuffer();
}

const stackOf = (kind) => (kind === "encoder" ? "encoder" : "decoder");
const layersOf = (kind) => header.layers[stackOf(kind)];
const headsOf = (kind) => array("attention." + kind).shape[1];
const sides = (kind) => ({ cross: [writes, source], encoder: [source, source], decoder: [writes, reads] })[kind];

// w^(1 / t) of every code; masked stays 0.
const powers = { t: 0, of: new Float64Array(65536) };
function power(t) {
  if (powers.t !== t) {
    powers.t = t;
    for (let code = 0; code < MASKED; code++) {
      const surprise = Math.min(code, FINE_END) / FINE + Math.max(code - FINE_END, 0) / COARSE;
      powers.of[code] = Math.exp(-surprise / t);
    }
    powers.of[MASKED] = 0;
  }
  return powers.of;
}

/* Attention of one query, softmax(s / t) = w^(1 / t) normalised. At t = 1 as the model gave it. */
function row(kind, layer, head, query, t) {
  const { shape: [, H, Q, K], data } = array("attention." + kind);
  const of = power(t), first = ((layer * H + head) * Q + query) * K, weights = new Float64Array(K);
  let sum = 0;
  for (let k = 0; k < K; k++) sum += weights[k] = of[data[first + k]];
  if (t !== 1) for (let k = 0; k < K; k++) weights[k] /= sum;
  return weights;
}

function masked(kind, layer, head, query, key) {
  const { shape: [, H, Q, K], data } = array("attention." + kind);
  return data[((layer * H + head) * Q + query) * K + key] === MASKED;
}

function vector(name, layer, token, head) {
  const { shape: [, T, H, E], data } = array(name), scale = array(name + ".scale").data;
  const place = (layer * T + token) * H + head;
  return Array.from(data.subarray(place * E, place * E + E), (v) => v * scale[place]);
}

const total = (values) => values.reduce((a, b) => a + b, 0);
const dot = (x, y) => total(x.map((v, i) => v * y[i]));

/* Query meets keys: scores, and the weight that they give by softmax. */
function meeting(kind, layer, head, query) {
  const q = vector("query." + kind, layer, query, head);
  const keys = sides(kind)[1];
  const scores = keys.map((_, k) => masked(kind, layer, head, query, k) ? -Infinity
    : dot(q, vector("key." + kind, layer, k, head)) / Math.sqrt(q.length));
  const top = Math.max(...scores), powered = scores.map((s) => Math.exp(s - top)), sum = total(powered);
  return { q, scores, weights: powered.map((p) => p / sum) };
}

function ranks(values) {
  const order = Array.from(values.keys()).sort((a, b) => values[a] - values[b]), found = [];
  for (let i = 0; i < order.length;) {
    let j = i;
    while (j + 1 < order.length && values[order[j + 1]] === values[order[i]]) j++;
    for (let n = i; n <= j; n++) found[order[n]] = (i + j) / 2; // ties share their rank
    i = j + 1;
  }
  return found;
}

/* Spearman's rank correlation; null where one side is all the same. */
function rankCorrelation(x, y) {
  const a = ranks(Array.from(x)), b = ranks(Array.from(y)), mean = (a.length - 1) / 2;
  let ab = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) {
    ab += (a[i] - mean) * (b[i] - mean); aa += (a[i] - mean) ** 2; bb += (b[i] - mean) ** 2;
  }
  return aa && bb ? ab / Math.sqrt(aa * bb) : null;
}

// ---------------------------------------------------------------- words

const segmenter = Intl.Segmenter ? new Intl.Segmenter("en", { granularity: "grapheme" }) : null;
const graphemes = (text) => segmenter ? Array.from(segmenter.segment(text), (part) => part.segment) : Array.from(text);
const label = (token, most = 12) => {
  const parts = graphemes(token.shown);
  return parts.length > most ? parts.slice(0, most - 1).join("") + "…" : token.shown;
};
const isolate = (text) => "\u2068" + text + "\u2069"; // a token's direction stays its own
const named = (token) => "“" + isolate(token.shown) + "”";
const percent = (w) => (w === 0 || w >= 0.0995 ? Math.round(w * 100) : w < 0.0005 ? "<0.1" : (w * 100).toFixed(1)) + " %";
const signed = (value, digits = 2) => (value < 0 && +value.toFixed(digits) !== 0 ? "−" : "") + Math.abs(value).toFixed(digits);
const count = (number, word) => number + " " + word + (number === 1 ? "" : "s");

function queryWords(kind, query) {
  return kind === "encoder" ? named(source[query]) : `having read ${named(reads[query])}, writes ${named(writes[query])}`;
}

// ---------------------------------------------------------------- colours

let ink = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue("--" + name).trim();
  ink = {};
  for (const name of ["paper", "card", "ink", "muted", "faint", "line", "soft", "accent", "accent-ink", "warm", "before"]) ink[name] = css(name);
  ink.positive = `rgb(${css("positive")})`;
  ink.negative = `rgb(${css("negative")})`;
  const rgb = (text) => text.split(",").map(Number);
  ink.plus = rgb(css("positive")); ink.minus = rgb(css("negative"));
  const stops = css("ramp").split(/\s+/).map(rgb);
  ink.ramp = Array.from({ length: 256 }, (_, i) => {
    const place = i / 255 * (stops.length - 1), n = Math.min(Math.floor(place), stops.length - 2);
    return stops[n].map((v, c) => Math.round(v + (stops[n + 1][c] - v) * (place - n)));
  });
  ink.zero = stops[0];
}
const shade = (v) => ink.ramp[Math.max(0, Math.min(255, Math.round(v * 255)))];
const rgb = ([r, g, b]) => `rgb(${r},${g},${b})`;
const visibleShade = (w) => shade(Math.sqrt(Math.max(0, w))); // so that small weights can be seen
const luminance = (colour) => {
  const [r, g, b] = colour.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const readableOn = (colour) => luminance(colour) > 0.179 ? "#000000" : "#ffffff";

// ---------------------------------------------------------------- pictures

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
const font = (size, weight) => `${weight || 400} ${size}px ${SANS}`;
function widthOf(text, size = 14, weight = 400) {
  const key = size + "/" + weight + "/" + text;
  let width = widths.get(key);
  if (width === undefined) {
    pen.font = font(size, weight);
    widths.set(key, width = pen.measureText(text).width);
  }
  return width;
}

function wrapped(text, width, size) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const line = lines[lines.length - 1], longer = line ? line + " " + word : word;
    if (line && widthOf(longer, size) > width) lines.push(word); else lines[lines.length - 1] = longer;
  }
  return lines;
}

class Picture {
  constructor(width) { Object.assign(this, { width, height: 0, shapes: [], spots: [], fields: [] }); }
  reach(y) { this.height = Math.max(this.height, y); }
  rect(x, y, w, h, look) { this.shapes.push({ is: "rect", x, y, w, h, ...look }); this.reach(y + h); }
  path(d, look) { this.shapes.push({ is: "path", d, ...look }); }
  dot(x, y, r, look) { this.path(`M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`, look); }
  line(x1, y1, x2, y2, look) { this.path(`M${x1},${y1}L${x2},${y2}`, look); }
  text(x, y, text, look = {}) { this.shapes.push({ is: "text", x, y, text, size: 14, fill: ink.ink, anchor: "start", ...look }); this.reach(y + 4); }
  /* A map of cells: colours [rows x columns x 4]. */
  map(x, y, w, h, columns, rows, colours) { this.shapes.push({ is: "map", x, y, w, h, columns, rows, colours }); this.reach(y + h); }
  /* What can be chosen by button: group, row and column say where the arrow keys go. */
  spot(x, y, w, h, spot) { this.spots.push({ x, y, w, h, row: 0, column: 0, ...spot }); }
  /* Cells for the mouse. */
  field(x, y, w, h, columns, rows, tip, choose) { this.fields.push({ x, y, w, h, columns, rows, tip, choose }); }
  chip(x, y, w, h, text, look) {
    this.rect(x, y, w, h, { r: 8, ...look });
    this.text(x + w / 2, y + h / 2 + 5, text, { anchor: "middle", size: look.size || 14, weight: look.weight, fill: look.ink || ink.ink });
  }
}

function cellMap(columns, rows, colour) {
  const colours = new Uint8ClampedArray(columns * rows * 4);
  for (let i = 0, at = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
    const c = colour(i, j);
    colours[at++] = c[0]; colours[at++] = c[1]; colours[at++] = c[2]; colours[at++] = 255;
  }
  return colours;
}

function mapImage({ columns, rows, colours }) {
  const canvas = document.createElement("canvas");
  canvas.width = columns; canvas.height = rows;
  canvas.getContext("2d").putImageData(new ImageData(colours, columns, rows), 0, 0);
  return canvas;
}

const rounded = ({ x, y, w, h, r = 0 }) => {
  r = Math.min(r, w / 2, h / 2);
  return r > 0 ? `M${x + r},${y}h${w - 2 * r}a${r},${r} 0 0 1 ${r},${r}v${h - 2 * r}a${r},${r} 0 0 1 ${-r},${r}h${2 * r - w}a${r},${r} 0 0 1 ${-r},${-r}v${2 * r - h}a${r},${r} 0 0 1 ${r},${-r}Z`
    : `M${x},${y}h${w}v${h}h${-w}Z`;
};

function paint(picture, canvas, scale) {
  canvas.width = Math.ceil(picture.width * scale);
  canvas.height = Math.ceil(picture.height * scale);
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  for (const shape of picture.shapes) {
    c.globalAlpha = shape.opacity ?? 1;
    if (shape.is === "text") {
      c.font = font(shape.size, shape.weight);
      c.fillStyle = shape.fill;
      c.textAlign = { start: "left", middle: "center", end: "right" }[shape.anchor];
      c.direction = "ltr";
      if (shape.turn) {
        c.save(); c.translate(shape.x, shape.y); c.rotate(shape.turn * Math.PI / 180); c.fillText(shape.text, 0, 0); c.restore();
      } else c.fillText(shape.text, shape.x, shape.y);
    } else if (shape.is === "map") {
      c.imageSmoothingEnabled = false;
      c.drawImage(mapImage(shape), shape.x, shape.y, shape.w, shape.h);
    } else if (shape.is === "rect" && !shape.r && !shape.stroke) {
      c.fillStyle = shape.fill; c.fillRect(shape.x, shape.y, shape.w, shape.h);
    } else {
      const outline = new Path2D(shape.is === "rect" ? rounded(shape) : shape.d);
      if (shape.fill) { c.fillStyle = shape.fill; c.fill(outline); }
      if (shape.stroke) {
        c.strokeStyle = shape.stroke; c.lineWidth = shape.width || 1; c.lineCap = "round"; c.lineJoin = "round";
        c.setLineDash(shape.dash || []); c.stroke(outline); c.setLineDash([]);
      }
    }
  }
}

const XML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => XML[c]);
const short = (v) => Math.round(v * 100) / 100;

function svgOf(picture, title) {
  const parts = [`<svg xmlns="http://www.w3.org/2000/svg" width="${short(picture.width)}" height="${short(picture.height)}" viewBox="0 0 ${short(picture.width)} ${short(picture.height)}"><title>${escaped(title)}</title>`];
  const common = (s) => (s.opacity === undefined ? "" : ` opacity="${short(s.opacity)}"`) + ` fill="${s.fill || "none"}"`
    + (s.stroke ? ` stroke="${s.stroke}" stroke-width="${short(s.width || 1)}" stroke-linecap="round" stroke-linejoin="round"` : "")
    + (s.dash ? ` stroke-dasharray="${s.dash.join(" ")}"` : "");
  for (const s of picture.shapes) {
    if (s.is === "rect") {
      parts.push(`<rect x="${short(s.x)}" y="${short(s.y)}" width="${short(s.w)}" height="${short(s.h)}"${s.r ? ` rx="${s.r}"` : ""}${common(s)}/>`);
    } else if (s.is === "path") {
      parts.push(`<path d="${s.d.replace(/-?\d+\.\d{3,}/g, (v) => short(+v))}"${common(s)}/>`);
    } else if (s.is === "map") {
      parts.push(`<image x="${short(s.x)}" y="${short(s.y)}" width="${short(s.w)}" height="${short(s.h)}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${mapImage(s).toDataURL()}"/>`);
    } else {
      const turn = s.turn ? ` transform="rotate(${s.turn} ${short(s.x)} ${short(s.y)})"` : "";
      parts.push(`<text x="${short(s.x)}" y="${short(s.y)}" font-family="${escaped(SANS)}" font-size="${s.size}"${s.weight ? ` font-weight="${s.weight}"` : ""} text-anchor="${s.anchor}" direction="ltr" unicode-bidi="isolate"${turn}${common(s)} xml:space="preserve">${escaped(s.text)}</text>`);
    }
  }
  return parts.join("\n") + "\n</svg>\n";
}

// ---------------------------------------------------------------- selection

const state = { kind: "cross", layer: 0, head: 0, query: 0, key: 0, temperature: 1, pair: 0 };
// Decoder positions and source tokens that were chosen last, for views that need the other side.
const last = { read: 0, source: 0, cross: 0 };
const number = (kind = state.kind, layer = state.layer) => layersOf(kind)[layer];
const atPosition = () => Math.min(last.read, writes.length - 1);
const crossLayer = () => state.kind === "encoder" ? Math.min(last.cross, layersOf("cross").length - 1) : state.layer;
const crossHead = () => Math.min(state.head, headsOf("cross") - 1);

function clamp() {
  const [rows, columns] = sides(state.kind), within = (v, n) => Math.max(0, Math.min(n - 1, v));
  state.layer = within(state.layer, layersOf(state.kind).length);
  state.head = within(state.head, headsOf(state.kind));
  state.query = within(state.query, rows.length);
  state.key = within(state.key, columns.length);
  if (masked(state.kind, state.layer, state.head, state.query, state.key)) state.key = state.query;
  if (state.kind !== "encoder") { last.read = state.query; last.cross = state.layer; } else last.source = state.query;
}

function select(change) {
  if (change.kind && change.kind !== state.kind && change.query === undefined) {
    state.query = change.kind === "encoder" ? last.source : last.read;
  }
  Object.assign(state, change);
  clamp();
  redraw();
}

// ---------------------------------------------------------------- 1 spotlight

const chipWidth = (text, size = 14, weight = 400) => Math.max(34, widthOf(text, size, weight) + 22);
function fitted(token, width, size, weight) {
  for (let most = 12; most > 2; most--) {
    const text = label(token, most);
    if (widthOf(text, size, weight) <= width) return text;
  }
  return label(token, 2);
}
const tokenStyle = (token) => token.special ? { dash: [4, 3] } : {};

function queryChoice(i, rows) {
  const { kind } = state;
  const words = kind === "encoder" ? `Query ${i + 1} of ${rows.length}: ${named(rows[i])}` : `Query ${i + 1} of ${rows.length}: ${queryWords(kind, i)}`;
  return { group: "query", column: i, label: words, tip: kind === "encoder" ? rows[i].shown : `has read ${isolate(reads[i].shown)}\nwrites ${isolate(writes[i].shown)}`, pressed: i === state.query, choose: () => select({ query: i }) };
}

function keyChoice(j, columns, weights, hidden) {
  const words = `Key ${j + 1} of ${columns.length}: ${named(columns[j])}, ${hidden ? "masked" : percent(weights[j])}`;
  return { group: "key", column: j, label: words, tip: `${isolate(columns[j].shown)}\n${hidden ? "not yet written: masked" : percent(weights[j])}`, pressed: j === state.key, choose: () => select({ key: j }) };
}

function spread(sizes, width) {
  const n = sizes.length, slot = Math.min(136, width / n);
  if (Math.max(...sizes) + 10 <= slot) return sizes.map((_, i) => width / 2 + (i - (n - 1) / 2) * slot);
  const gap = Math.min(14, (width - total(sizes)) / n);
  let x = (width - total(sizes) - gap * (n - 1)) / 2;
  return sizes.map((size) => { const centre = x + size / 2; x += size + gap; return centre; });
}

function spotlight(p) {
  const { kind, layer, head, query, key, temperature } = state, [rows, columns] = sides(kind);
  const weights = row(kind, layer, head, query, temperature), decoder = kind !== "encoder";
  if (Math.max(rows.length, columns.length) > LINES_UP_TO) return shadedTexts(p, weights);
  const rowSum = "the row adds up to " + sumOf(weights);
  const hidden = (j) => masked(kind, layer, head, query, j);
  const above = (i) => isolate(label(reads[i])) + " →";
  const rowSizes = rows.map((token, i) => Math.max(chipWidth(label(token), 15, 600), decoder ? widthOf(above(i), 12) + 8 : 0));
  const columnSizes = columns.map((token) => chipWidth(label(token), 15));
  const fits = (sizes) => total(sizes) + 7 * sizes.length <= p.width;
  const across = fits(rowSizes) && fits(columnSizes);
  const lines = (from, to) => {
    for (const chosen of [false, true]) rows.forEach((_, i) => {
      if ((i === query) !== chosen) return;
      const row_i = chosen ? weights : row(kind, layer, head, i, temperature);
      row_i.forEach((w, j) => {
        if (w < (chosen ? 0.004 : 0.06)) return;
        const [x1, y1] = from(i), [x2, y2] = to(j), m = across ? `${x1},${y1 + (y2 - y1) * 0.55} ${x2},${y1 + (y2 - y1) * 0.45}` : `${x1 + (x2 - x1) * 0.55},${y1} ${x1 + (x2 - x1) * 0.45},${y2}`;
        p.path(`M${x1},${y1}C${m} ${x2},${y2}`, { stroke: chosen ? (j === key ? ink.warm : ink.accent) : ink.faint, width: chosen ? 1.2 + 11 * w : 0.8 + 2.4 * w, opacity: chosen ? 0.35 + 0.6 * w : 0.1 + 0.22 * w });
      });
    });
  };
  const drawRow = (i, x, y, w, h, text = label(rows[i])) => {
    const on = i === query;
    p.chip(x, y, w, h, text, { fill: on ? ink.accent : ink.soft, stroke: on ? ink.accent : ink.line, ink: on ? ink["accent-ink"] : ink.ink, size: 15, weight: 600, ...tokenStyle(rows[i]) });
    p.spot(x, y, w, h, { ...queryChoice(i, rows), row: 0, turned: !across });
  };
  const drawColumn = (j, x, y, w, h, text = label(columns[j])) => {
    const off = hidden(j), colour = visibleShade(weights[j]);
    p.chip(x, y, w, h, text, { fill: off ? undefined : rgb(colour), stroke: j === key ? ink.warm : ink.line, width: j === key ? 2.5 : 1, ink: off ? ink.muted : readableOn(colour), size: 15, ...(off ? { dash: [2, 4] } : tokenStyle(columns[j])) });
    p.spot(x, y, w, h, { ...keyChoice(j, columns, weights, off), row: 1, turned: !across });
  };
  const note = (j) => hidden(j) ? "masked" : percent(weights[j]);
  const noteLook = (j) => ({ size: 12, weight: j === key ? 700 : 400, fill: weights[j] >= 0.005 ? ink.ink : ink.muted });
  if (across) {
    const xs = spread(rowSizes, p.width), ks = spread(columnSizes, p.width), top = decoder ? 26 : 2, bottom = top + 232;
    lines((i) => [xs[i], top + 38], (j) => [ks[j], bottom - 2]);
    rows.forEach((_, i) => {
      if (decoder) p.text(xs[i], 14, above(i), { anchor: "middle", size: 12, fill: i === query ? ink.warm : ink.muted, weight: i === query ? 600 : 400 });
      drawRow(i, xs[i] - rowSizes[i] / 2, top, rowSizes[i], 36);
    });
    columns.forEach((_, j) => {
      drawColumn(j, ks[j] - columnSizes[j] / 2, bottom, columnSizes[j], 36);
      p.text(ks[j], bottom + 54, columnSizes[j] > 46 || !hidden(j) ? note(j) : "—", { anchor: "middle", ...noteLook(j) });
    });
    p.text(p.width, bottom + 78, rowSum, { anchor: "end", size: 12, fill: ink.muted });
  } else {
    const pitch = 40, n = Math.max(rows.length, columns.length), span = Math.min(p.width, 860), x0 = (p.width - span) / 2;
    const yq = (i) => 18 + (i + (n - rows.length) / 2) * pitch, yk = (j) => 18 + (j + (n - columns.length) / 2) * pitch;
    const half = x0 + span * 0.42, right = x0 + span * 0.6, room = span * 0.4 - 54;
    lines((i) => [half, yq(i)], (j) => [right, yk(j)]);
    rows.forEach((token, i) => {
      const text = fitted(token, span * 0.26, 15, 600), w = chipWidth(text, 15, 600);
      drawRow(i, half - w, yq(i) - 16, w, 32, text);
      // Where there is no room, the row above shows it.
      if (decoder && (span >= 560 || i === query || !i)) p.text(half - w - 7, yq(i) + 4, isolate(fitted(reads[i], half - x0 - w - 26, 12)) + " →", { anchor: "end", size: 12, fill: i === query ? ink.warm : ink.muted, weight: i === query ? 600 : 400 });
    });
    columns.forEach((token, j) => {
      const text = fitted(token, room - 22, 15), w = chipWidth(text, 15);
      drawColumn(j, right, yk(j) - 16, w, 32, text);
      p.text(right + w + 9, yk(j) + 4, note(j), noteLook(j));
    });
    p.text(x0 + span, n * pitch + 14, rowSum, { anchor: "end", size: 12, fill: ink.muted });
  }
}
const sumOf = (weights) => total(Array.from(weights)).toFixed(3);

function shadedTexts(p, weights) {
  const { kind, layer, head, query, key } = state, [rows, columns] = sides(kind);
  const beside = p.width >= 700, w = beside ? (p.width - 44) / 2 : p.width;
  const flow = (list, x0, y0, sizeOf, height, draw) => {
    let x = x0, y = y0;
    list.forEach((token, i) => {
      const size = Math.min(sizeOf(token), w);
      if (x + size > x0 + w && x > x0) { x = x0; y += height; }
      draw(i, x, y, size);
      x += size + 5;
    });
    return y + height;
  };
  p.text(0, 13, kind === "encoder" ? "who looks" : "what is being written", { size: 12, fill: ink.muted });
  const end = flow(rows, 0, 26, (token) => chipWidth(label(token)), 36, (i, x, y, size) => {
    const on = i === query;
    p.chip(x, y, size, 29, label(rows[i]), { fill: on ? ink.accent : ink.soft, stroke: on ? ink.accent : ink.line, ink: on ? ink["accent-ink"] : ink.ink, weight: on ? 600 : 400, ...tokenStyle(rows[i]) });
    p.spot(x, y, size, 29, queryChoice(i, rows));
  });
  const x0 = beside ? w + 44 : 0, y0 = beside ? 0 : end + 18;
  p.text(x0, y0 + 13, "what it looks at", { size: 12, fill: ink.muted });
  flow(columns, x0, y0 + 26, (token) => chipWidth(label(token)), 48, (j, x, y, size) => {
    const off = masked(kind, layer, head, query, j), colour = visibleShade(weights[j]);
    p.chip(x, y, size, 29, label(columns[j]), { fill: off ? undefined : rgb(colour), stroke: j === key ? ink.warm : ink.line, width: j === key ? 2.5 : 1, ink: off ? ink.muted : readableOn(colour), ...(off ? { dash: [2, 4] } : tokenStyle(columns[j])) });
    if (weights[j] >= 0.03 || j === key) p.text(x + size / 2, y + 42, off ? "masked" : percent(weights[j]), { anchor: "middle", size: 11, fill: ink.muted });
    p.spot(x, y, size, 29, { ...keyChoice(j, columns, weights, off), row: 1 });
  });
}

function spotlightWords() {
  const { kind, layer, head, query, temperature } = state, keys = sides(kind)[1];
  const weights = row(kind, layer, head, query, temperature);
  const best = Array.from(weights.keys()).sort((a, b) => weights[b] - weights[a]).slice(0, 3).filter((j) => weights[j] >= 0.005);
  const looks = best.map((j) => `${named(keys[j])} ${percent(weights[j])}`).join(", ");
  const who = kind === "encoder" ? `${named(source[query])} looks at` : `Having read ${named(reads[query])}, the decoder writes ${named(writes[query])} and looks at`;
  const where = { cross: "the source", encoder: "the source", decoder: "what was written so far" }[kind];
  const warmth = temperature === 1 ? "" : ` Temperature ${temperature.toFixed(2)}.`;
  return `Layer ${number()}, head ${head + 1}. ${who} ${looks} of ${where}. The row adds up to ${sumOf(weights)}.${warmth}`;
}

// ---------------------------------------------------------------- 2 heads

function headMaps(p) {
  const { kind, temperature } = state, { shape: [L, H, Q, K], data } = array("attention." + kind), off = array("off." + kind);
  const left = p.width < 560 ? 30 : 62, gap = p.width < 560 ? 5 : 12, each = Math.min(220, (p.width - left - 2 - gap * (H - 1)) / H);
  const tall = Math.max(14, Math.min(each * 1.5, each * Q / K)), below = off ? 30 : 8, of = power(temperature);
  const falls = off && Array.from({ length: L * H }, (_, i) => total(Array.from(off.data.subarray(i * Q2(off), (i + 1) * Q2(off)))));
  const most = off ? Math.max(1e-9, ...falls.map(Math.abs)) : 1;
  const lut = Array.from({ length: 256 }, (_, i) => shade(Math.sqrt(i / 255)));
  for (let h = 0; h < H; h++) p.text(left + h * (each + gap) + each / 2, 12, (p.width < 560 ? "" : "head ") + (h + 1), { size: 12, anchor: "middle", fill: ink.muted });
  for (let l = 0; l < L; l++) {
    const y = 22 + l * (tall + below + 10);
    p.text(0, y + tall / 2 + 4, (p.width < 560 ? "L" : "layer ") + number(kind, l), { size: 12, fill: ink.muted });
    for (let h = 0; h < H; h++) {
      const x = left + h * (each + gap), on = l === state.layer && h === state.head, colours = new Uint8ClampedArray(Q * K * 4);
      for (let q = 0, at = 0, from = (l * H + h) * Q * K; q < Q; q++, from += K) {
        let sum = 0;
        for (let k = 0; k < K; k++) sum += of[data[from + k]];
        for (let k = 0; k < K; k++) {
          const c = lut[Math.min(255, of[data[from + k]] / sum * 255) | 0];
          colours[at++] = c[0]; colours[at++] = c[1]; colours[at++] = c[2]; colours[at++] = 255;
        }
      }
      p.map(x, y, each, tall, K, Q, colours);
      p.rect(x - 0.5, y - 0.5, each + 1, tall + 1, { stroke: on ? ink.warm : ink.line, width: on ? 3 : 1, r: 2 });
      let words = `Layer ${number(kind, l)}, head ${h + 1}`;
      if (off) {
        const fall = falls[l * H + h], size = Math.abs(fall) / most * each;
        p.rect(x, y + tall + 6, each, 5, { fill: ink.soft, r: 2.5 });
        if (size > 0.5) p.rect(x, y + tall + 6, size, 5, { fill: fall < 0 ? ink.negative : ink.accent, r: 2.5 });
        p.text(x + each / 2, y + tall + 25, signed(fall, each < 44 || Math.abs(fall) >= 10 ? 1 : 2), { size: each < 44 ? 10 : 12, anchor: "middle", weight: on ? 700 : 400, fill: ink.ink });
        words += `: without it the output's log-probability ${fall < 0 ? "rises" : "falls"} by ${Math.abs(fall).toFixed(2)} nats`;
      }
      p.spot(x, y, each, tall, { group: "heads", row: l, column: h, label: words, tip: words, pressed: on, choose: () => select({ layer: l, head: h }) });
    }
  }
}
const Q2 = (off) => off.shape[2];

function headWords() {
  const { kind, layer, head } = state, off = array("off." + kind);
  if (!off) return header.missing.heads ? `No switch-off effects: ${header.missing.heads}.` : "";
  const T = off.shape[2], first = (layer * off.shape[1] + head) * T, falls = Array.from(off.data.subarray(first, first + T));
  const worst = falls.indexOf(Math.max(...falls)), parts = array("part." + kind), Q = parts.shape[2], place = (layer * parts.shape[1] + head) * Q;
  const adds = total(Array.from(parts.data.subarray(place, place + Q))) / Q, fall = total(falls);
  return `Layer ${number()}, head ${head + 1} adds a vector of length ${adds.toFixed(2)} on average. Switched off, the whole output's log-probability ${fall < 0 ? "rises" : "falls"} by ${Math.abs(fall).toFixed(2)} nats`
    + (falls[worst] > 0.01 ? `, most at ${named(writes[worst])} (${falls[worst].toFixed(2)}).` : ".");
}

// ---------------------------------------------------------------- 3 query, key, value

function strips(p) {
  const { kind, layer, head, query, key } = state, [rows, columns] = sides(kind);
  const { q, scores, weights } = meeting(kind, layer, head, query), k = vector("key." + kind, layer, key, head), v = vector("value." + kind, layer, key, head);
  const left = p.width < 560 ? 58 : 96, E = q.length, step = (p.width - left) / E, biggest = (list) => Math.max(1e-9, ...list.map(Math.abs));
  const shared = Math.max(biggest(q), biggest(k)), product = q.map((x, i) => x * k[i]);
  const strip = (y, name, under, values, most) => {
    p.text(0, y + 20, name, { size: 14, weight: 600 });
    p.text(0, y + 36, under, { size: 11, fill: ink.muted });
    p.line(left, y + 24, p.width, y + 24, { stroke: ink.line });
    values.forEach((x, i) => {
      const h = Math.abs(x) / most * 21;
      p.rect(left + i * step + step * 0.1, x >= 0 ? y + 24 - h : y + 24, step * 0.8, Math.max(h, 0.6), { fill: x >= 0 ? ink.positive : ink.negative, r: step > 7 ? 1.5 : 0 });
    });
    p.field(left, y, p.width - left, 48, E, 1, (_, i) => `${name}, dimension ${i + 1} of ${E}: ${signed(values[i], 4)}`, null);
  };
  const cut = p.width < 560 ? 5 : 10;
  strip(0, "query", isolate(label(rows[query], cut)), q, shared);
  strip(56, "key", isolate(label(columns[key], cut)), k, shared);
  strip(112, p.width < 560 ? "q × k" : "query × key", "one by one", product, biggest(product));
  strip(168, "value", isolate(label(columns[key], cut)), v, biggest(v));
  // All keys: where the softmax puts this one.
  const chosen = columns.map((_, j) => j).filter((j) => scores[j] > -Infinity).sort((a, b) => scores[b] - scores[a]).slice(0, 12);
  if (!chosen.includes(key)) chosen[chosen.length - 1] = key;
  chosen.sort((a, b) => a - b);
  const y0 = 252, wide = p.width >= 620, xs = [left, left + (wide ? 90 : 62), left + (wide ? 190 : 62)], span = p.width - xs[2] - 62;
  p.text(xs[0], y0, "key", { size: 12, fill: ink.muted });
  p.text(xs[1], y0, "score", { size: 12, fill: ink.muted, anchor: wide ? "start" : "middle" });
  p.text(xs[2] + (wide ? 0 : 24), y0, "softmax over all keys", { size: 12, fill: ink.muted });
  chosen.forEach((j, n) => {
    const y = y0 + 20 + n * 24, on = j === key, x = xs[2] + (wide ? 0 : 24);
    p.text(xs[0], y, isolate(label(columns[j], wide ? 9 : 5)), { weight: on ? 700 : 400, fill: on ? ink.warm : ink.ink });
    p.text(xs[1] + (wide ? 34 : 18), y, signed(scores[j]), { size: 13, anchor: "end" });
    p.rect(x, y - 11, Math.max(1.5, span * weights[j]), 13, { fill: on ? ink.warm : ink.accent, r: 3 });
    p.text(x + span * weights[j] + 8, y, weights[j].toFixed(4), { size: 12, fill: ink.muted, weight: on ? 700 : 400 });
  });
  p.reach(y0 + 20 + chosen.length * 24);
}

function stripWords() {
  const { kind, layer, head, query, key, temperature } = state, { q, scores, weights } = meeting(kind, layer, head, query);
  const score = scores[key], own = row(kind, layer, head, query, 1)[key], columns = sides(kind)[1];
  if (score === -Infinity) return `${named(columns[key])} is masked for this query.`;
  const warm = temperature === 1 ? "" : ` At temperature ${temperature.toFixed(2)}: ${row(kind, layer, head, query, temperature)[key].toFixed(4)}.`;
  return `q·k = ${signed(score * Math.sqrt(q.length), 3)}; divided by √${q.length}: ${signed(score, 3)}; softmax over ${count(scores.filter((s) => s > -Infinity).length, "key")}: ${weights[key].toFixed(4)}. The model's own weight: ${own.toFixed(4)}.${warm}`;
}

// ---------------------------------------------------------------- 4 positions

const positionStack = () => stackOf(state.kind);
const pairOf = (i, D, layout) => layout === "halves" ? [i, i + D / 2] : [2 * i, Math.min(2 * i + 1, D - 1)];

function waves(p) {
  const stack = positionStack(), { shape: [N, D], data } = array("positions." + stack), scale = array("positions." + stack + ".scale").data;
  const at = (n, d) => data[n * D + d] * scale[n], layout = header.positions[stack], dims = pairOf(state.pair, D, layout);
  const beside = p.width >= 760, w = beside ? p.width * 0.56 : p.width, h = 220, left = 36, here = Math.min(state.query, N - 1);
  let most = 1e-9;
  for (let n = 0; n < N; n++) for (const d of dims) most = Math.max(most, Math.abs(at(n, d)));
  const x = (n) => left + n * (w - left - 10) / Math.max(1, N - 1), y = (v) => h / 2 + 6 - v / most * (h / 2 - 22);
  [most, 0, -most].forEach((v) => {
    p.line(left, y(v), w, y(v), { stroke: ink.line });
    p.text(left - 8, y(v) + 4, signed(v, Math.abs(v) === 1 || !v ? 0 : 2), { size: 11, anchor: "end", fill: ink.muted });
  });
  for (let n = 0; n < N; n += 16) p.text(x(n), h + 12, String(n), { size: 11, anchor: "middle", fill: ink.muted });
  p.line(x(here), 4, x(here), h - 4, { stroke: ink.warm, dash: [3, 4] });
  p.text(x(here) + (here > N * 0.8 ? -5 : 5), 12, "position " + here, { size: 12, fill: ink.warm, anchor: here > N * 0.8 ? "end" : "start" });
  dims.forEach((d, c) => {
    const colour = c ? ink.negative : ink.accent;
    let path = "";
    for (let n = 0; n < N; n++) path += (n ? "L" : "M") + x(n) + "," + y(at(n, d));
    p.path(path, { stroke: colour, width: 2, dash: c ? [6, 4] : undefined });
    for (let n = 0; n < N; n++) if (c) p.rect(x(n) - 2.4, y(at(n, d)) - 2.4, 4.8, 4.8, { fill: colour }); else p.dot(x(n), y(at(n, d)), 2.8, { fill: colour });
    p.text(left + 6 + c * 150, h + 30, `${c ? "■" : "●"} dimension ${d}: ${signed(at(here, d), 4)}`, { size: 12, fill: ink.ink });
  });
  const x0 = beside ? w + 34 : 0, y0 = beside ? 8 : h + 52, mw = p.width - x0, mh = 204;
  let all = 1e-9;
  for (let n = 0; n < N; n++) for (let d = 0; d < D; d++) all = Math.max(all, Math.abs(at(n, d)));
  p.map(x0, y0, mw, mh, D, N, cellMap(D, N, (n, d) => mix(at(n, d) / all)));
  p.rect(x0, y0 + here * mh / N, mw, Math.max(2, mh / N), { stroke: ink.warm, width: 1.5 });
  p.text(x0, y0 + mh + 17, `${D} dimensions across, ${N} positions down`, { size: 12, fill: ink.muted });
  p.field(x0, y0, mw, mh, D, N, (n, d) => `position ${n}, dimension ${d}: ${signed(at(n, d), 4)}`, null);
}
const mix = (v) => { const to = v < 0 ? ink.minus : ink.plus, u = Math.min(1, Math.abs(v)); return ink.zero.map((c, i) => c + (to[i] - c) * u); };

function waveWords() {
  const stack = positionStack(), D = array("positions." + stack).shape[1], layout = header.positions[stack], i = state.pair;
  const length = 2 * Math.PI * 10000 ** (2 * i / D), how = { interleaved: "interleaved, as in the paper: even dimensions are sines, odd ones cosines", halves: "in halves, as in Marian: first all sines, then all cosines", learned: "learned: no formula, and no pairs; two neighbouring dimensions are drawn" }[layout];
  return `The ${stack}'s table. Layout: ${how}.` + (layout === "learned" ? "" : ` This pair turns once in ${length < 100 ? length.toFixed(1) : Math.round(length).toLocaleString("en")} positions.`);
}

// ---------------------------------------------------------------- 5 stream

function streamRows(p) {
  const stack = stackOf(state.kind), { shape: [R, F, T], data } = array("stream." + stack), t = Math.min(state.query, T - 1);
  const at = (r, f) => data[(r * F + f) * T + t], names = header.sublayers[stack], wide = p.width >= 820;
  const before = array("before." + stack), after = array("after." + stack), bins = before.shape[2], range = array("range." + stack).data;
  let most = 1e-9;
  for (let r = 0; r < R; r++) most = Math.max(most, at(r, 0), at(r, 1));
  const height = wide ? 50 : 76, head = wide ? 26 : 4;
  const columns = wide ? { x: 190, f: 190 + (p.width - 560) / 2, angle: p.width - 350, bell: p.width - 274, std: p.width } : { x: 0, f: p.width * 0.34, angle: p.width * 0.68, bell: p.width * 0.68 + 4, std: p.width };
  const span = (wide ? (p.width - 560) / 2 : p.width * 0.34) - 52;
  if (wide) [[0, "sub-layer"], [columns.x, "length of x"], [columns.f, "length of f(x)"], [columns.angle, "angle"], [columns.bell, "before ▒ and after LayerNorm ─"]].forEach(([x, text]) => p.text(x, 12, text, { size: 12, fill: ink.muted }));
  if (wide) p.text(p.width, 12, "std", { size: 12, fill: ink.muted, anchor: "end" });
  for (let r = 0; r < R; r++) {
    const y = head + r * height, n = header.layers[stack][Math.floor(r / names.length)], name = names[r % names.length], y1 = wide ? y + 16 : y + 40;
    if (r) p.line(0, y - 1, p.width, y - 1, { stroke: ink.line, opacity: r % names.length ? 0.4 : 1 });
    p.text(0, wide ? y + 26 : y + 18, `layer ${n} · ${name}`, { size: wide ? 14 : 13, weight: wide ? 400 : 600 });
    for (const [x, f, colour] of [[columns.x, 0, ink.faint], [columns.f, 1, ink.accent]]) {
      p.rect(x, y1, Math.max(1.5, span * at(r, f) / most), 12, { fill: colour, r: 3 });
      p.text(x + span * at(r, f) / most + 7, y1 + 11, at(r, f).toFixed(1), { size: 12, fill: ink.muted });
      if (!wide) p.text(x, y1 + 25, f ? "|f(x)|" : "|x|", { size: 11, fill: ink.muted });
    }
    const degrees = Math.acos(Math.max(-1, Math.min(1, at(r, 2)))) * 180 / Math.PI;
    if (wide) {
      const a = degrees * Math.PI / 180, cx = columns.angle + 10, cy = y + 30;
      p.line(cx, cy, cx + 15, cy, { stroke: ink.faint, width: 2 });
      p.line(cx, cy, cx + 15 * Math.cos(a), cy - 15 * Math.sin(a), { stroke: ink.accent, width: 2 });
      p.text(columns.angle + 30, y + 27, Math.round(degrees) + "°", { size: 12 });
    }
    const bell = (counts, filled) => {
      const list = Array.from(counts.data.subarray((r * T + t) * bins, (r * T + t + 1) * bins)), top = Math.max(...list), w = wide ? 150 : p.width * 0.32 - 8, base = wide ? y + 36 : y + 54, x0 = columns.bell;
      let d = "";
      list.forEach((v, i) => { d += (i ? "L" : "M") + (x0 + i * w / (bins - 1)) + "," + (base - v / top * 28); });
      p.path(filled ? d + `L${x0 + w},${base}L${x0},${base}Z` : d, filled ? { fill: ink.before } : { stroke: ink.accent, width: 1.8 });
      p.text(x0, base + 1 + 10, "−" + range[r * T + t].toFixed(1), { size: 9, fill: ink.muted });
      p.text(x0 + w, base + 1 + 10, range[r * T + t].toFixed(1), { size: 9, fill: ink.muted, anchor: "end" });
    };
    bell(before, true); bell(after, false);
    const std = `${at(r, 4).toFixed(2)} → ${at(r, 6).toFixed(2)}`;
    p.text(p.width, wide ? y + 26 : y + 18, wide ? std : `${Math.round(degrees)}°, std ${std}`, { size: 12, anchor: "end" });
    p.reach(y + height);
  }
}

function streamWords() {
  const stack = stackOf(state.kind), token = (stack === "encoder" ? source : reads)[Math.min(state.query, (stack === "encoder" ? source : reads).length - 1)];
  return `The stream at ${stack === "encoder" ? "" : "the position that has read "}${named(token)} in the ${stack}. `
    + (header.norm === "post" ? "Post-Norm: y = LayerNorm(x + f(x)) brings the sum back to one scale after every sub-layer." : "Pre-Norm: y = x + f(LayerNorm(x)). The stream itself is never brought back to one scale, so it grows.")
    + " std is the biased standard deviation that LayerNorm divides by.";
}

function unitsAndPath(p) {
  const stack = stackOf(state.kind), beside = p.width >= 760, w = beside ? p.width * 0.46 : p.width;
  let y = 0;
  if (array("active." + stack)) {
    const { shape: [L, T], data } = array("active." + stack), t = Math.min(state.query, T - 1), ids = array("unit." + stack), values = array("strength." + stack), n = ids.shape[2];
    p.text(0, 14, `Feed-forward: active of ${header.units[stack]} hidden units`, { size: 14, weight: 600 });
    for (let l = 0; l < L; l++) {
      const y0 = 30 + l * 62, share = data[l * T + t], bar = w - 108;
      p.text(0, y0 + 13, "layer " + header.layers[stack][l], { size: 13 });
      p.rect(56, y0 + 3, bar, 12, { fill: ink.soft, r: 3 });
      p.rect(56, y0 + 3, Math.max(1.5, bar * share), 12, { fill: ink.accent, r: 3 });
      p.text(56 + bar + 8, y0 + 13, percent(share), { size: 12 });
      const each = bar / n;
      for (let i = 0; i < n; i++) {
        const place = (l * T + t) * n + i, v = values.data[place];
        p.text(56 + i * each, y0 + 34, "#" + ids.data[place], { size: 11, fill: ink.muted });
        p.text(56 + i * each, y0 + 48, v.toFixed(2), { size: 11 });
      }
    }
    y = 30 + L * 62;
  }
  if (array("path." + stack)) pathPlane(p, stack, beside ? w + 40 : 0, beside ? 0 : y + 16, p.width - (beside ? w + 40 : 0));
}

function pathPlane(p, stack, x0, y0, w) {
  const { shape: [L, T], data } = array("path." + stack), t = Math.min(state.query, T - 1), h = Math.min(380, w * 0.8), list = stack === "encoder" ? source : reads;
  const lo = [Infinity, Infinity], hi = [-Infinity, -Infinity];
  for (let i = 0; i < L * T * 2; i++) { lo[i % 2] = Math.min(lo[i % 2], data[i]); hi[i % 2] = Math.max(hi[i % 2], data[i]); }
  const x = (l, i) => x0 + 30 + (data[(l * T + i) * 2] - lo[0]) / (hi[0] - lo[0] || 1) * (w - 70), y = (l, i) => y0 + 46 + (data[(l * T + i) * 2 + 1] - lo[1]) / (hi[1] - lo[1] || 1) * (h - 66);
  const share = header.variance[stack].map((v) => Math.round(v * 100));
  p.text(x0, y0 + 14, w < 420 ? "Path in two principal directions" : "Path through the layers, in two principal directions", { size: 14, weight: 600 });
  p.rect(x0, y0 + 26, w, h, { fill: ink.soft, r: 12 });
  const taken = [];
  for (const chosen of [false, true]) for (let i = 0; i < T; i++) {
    if ((i === t) !== chosen) continue;
    let d = "";
    for (let l = 0; l < L; l++) d += (l ? "L" : "M") + x(l, i) + "," + y(l, i);
    p.path(d, { stroke: chosen ? ink.warm : ink.faint, width: chosen ? 2.4 : 1, opacity: chosen ? 1 : 0.4 });
    p.dot(x(L - 1, i), y(L - 1, i), chosen ? 5 : 3, { fill: chosen ? ink.warm : ink.accent });
  }
  // The chosen token's labels first; others where they do not collide.
  const place = (px, py, text, look, left = false) => {
    const tw = widthOf(text, look.size, look.weight), box = [px, py - look.size, tw, look.size + 2];
    if (left || px + tw > x0 + w - 4) box[0] = px - tw - 16;
    if (taken.some((b) => b[0] < box[0] + box[2] && box[0] < b[0] + b[2] && b[1] < box[1] + box[3] && box[1] < b[1] + b[3])) return;
    taken.push(box);
    p.text(box[0], py, text, look);
  };
  place(x(L - 1, t) + 8, y(L - 1, t) + 5, isolate(label(list[t])), { size: 14, weight: 700, fill: ink.warm }, L > 1 && x(L - 2, t) > x(L - 1, t));
  for (let l = 0; l < L - 1; l++) {
    p.dot(x(l, t), y(l, t), 3, { fill: ink.card, stroke: ink.warm, width: 1.6 });
    place(x(l, t) + 7, y(l, t) - 5, l ? String(l) : "embedding", { size: 11, fill: ink.warm });
  }
  for (let i = 0; i < T; i++) if (i !== t) place(x(L - 1, i) + 7, y(L - 1, i) + 4, isolate(label(list[i])), { size: 12, fill: ink.muted });
  wrapped(`These two directions hold ${share[0]} % + ${share[1]} % of the variance; the rest is not drawn.`, w, 12).forEach((line, n) => p.text(x0, y0 + h + 44 + n * 17, line, { size: 12, fill: ink.muted }));
}

function stream(p) {
  if (array("stream.decoder")) streamRows(p);
  else p.text(0, 14, `No lengths and histograms: ${header.missing.stream}.`, { size: 13, fill: ink.muted });
  const lower = new Picture(p.width);
  unitsAndPath(lower);
  const y = p.height + 28;
  for (const shape of lower.shapes) p.shapes.push(moved(shape, y));
  p.reach(y + lower.height);
}
function moved(shape, dy) {
  if (shape.is !== "path") return { ...shape, y: shape.y + dy };
  // Of the letters that paths here use, M, L and C hold absolute pairs.
  return { ...shape, d: shape.d.replace(/([MLC])([^A-Za-z]+)/g, (_, letter, list) => letter + list.trim().split(/[\s,]+/).map((v, i) => i % 2 ? +v + dy : v).join(",")) };
}

// ---------------------------------------------------------------- 6 layer by layer

function lens(p) {
  const best = array("lens.id"), probable = array("lens.p"), ranksOf = array("lens.rank"), entropy = array("lens.entropy"), written = array("lens.written");
  const [L, T, K] = best.shape, t = atPosition(), left = p.width < 560 ? 44 : 82, each = p.width < 560 ? 54 : Math.max(66, Math.min(118, (p.width - left) / T)), perBlock = Math.max(1, Math.floor((p.width - left) / each));
  const shallow = L > 8 ? 30 : 36, name = (l) => l === 0 ? (p.width < 560 ? "emb." : "embedding") : (p.width < 560 ? "L" : "layer ") + l;
  let y = 0;
  for (let first = 0; first < T; first += perBlock) {
    const n = Math.min(perBlock, T - first);
    p.text(0, y + 16, "writes", { size: 12, fill: ink.muted });
    for (let c = 0; c < n; c++) {
      const on = first + c === t, text = label(writes[first + c], 7);
      p.text(left + c * each + each / 2, y + 16, text, { anchor: "middle", size: 14, weight: 700, fill: on ? ink.warm : ink.ink });
    }
    for (let l = 0; l < L; l++) {
      const y0 = y + 26 + l * (shallow + 3);
      p.text(0, y0 + shallow / 2 + 4, name(l), { size: 12, fill: ink.muted });
      for (let c = 0; c < n; c++) {
        const i = l * T + first + c, token = vocabulary.get(best.data[i * K]), share = probable.data[i * K], colour = shade(share * 0.94), right = best.data[i * K] === writes[first + c].id;
        const x = left + c * each;
        p.rect(x, y0, each - 3, shallow, { fill: rgb(colour), r: 6, stroke: first + c === t ? ink.warm : ink.line, width: first + c === t ? 1.6 : 1 });
        const on = readableOn(colour);
        p.text(x + (each - 3) / 2, y0 + shallow / 2 - 1, (right ? "✓ " : "") + isolate(label(token, right ? 5 : 7)), { anchor: "middle", size: 13, weight: right ? 700 : 400, fill: on });
        p.text(x + (each - 3) / 2, y0 + shallow / 2 + 12, Math.round(share * 100) + " %", { anchor: "middle", size: 10, fill: on });
      }
    }
    const rows = L, top = y + 26;
    p.field(left, top, n * each, rows * (shallow + 3), n, rows, (l, c) => {
      const i = l * T + first + c, list = Array.from({ length: K }, (_, k) => `${isolate(vocabulary.get(best.data[i * K + k]).shown)}  ${percent(probable.data[i * K + k])}`).join("\n");
      return `${name(l)}\n${list}\n${named(writes[first + c])} is number ${ranksOf.data[i]} (${percent(written.data[i])}); entropy ${entropy.data[i].toFixed(2)} bits`;
    }, (l, c) => select({ kind: state.kind === "encoder" ? "cross" : state.kind, query: first + c }));
    y = top + rows * (shallow + 3) + 20;
  }
  // The chosen token: five best of each layer.
  p.text(0, y + 16, `Five likeliest at ${isolate(label(writes[t]))} in each layer`, { size: 14, weight: 600 });
  const narrow = p.width < 640, end = narrow ? 0 : 190, span = (p.width - left - end) / K, tall = narrow ? 62 : 46;
  if (!narrow) { p.text(p.width - 92, y + 16, "rank", { size: 12, fill: ink.muted, anchor: "end" }); p.text(p.width, y + 16, "entropy", { size: 12, fill: ink.muted, anchor: "end" }); }
  for (let l = 0; l < L; l++) {
    const y0 = y + 30 + l * tall, i = l * T + t;
    p.text(0, y0 + 16, name(l), { size: 12, fill: ink.muted });
    for (let k = 0; k < K; k++) {
      const token = vocabulary.get(best.data[i * K + k]), share = probable.data[i * K + k], right = token.id === writes[t].id, x = left + k * span;
      p.text(x, y0 + 14, (right ? "✓ " : "") + isolate(label(token, narrow ? 4 : 9)), { size: 13, weight: right ? 700 : 400 });
      p.rect(x, y0 + 20, span - 14, 5, { fill: ink.soft, r: 2.5 });
      p.rect(x, y0 + 20, Math.max(1, (span - 14) * share), 5, { fill: right ? ink.accent : ink.faint, r: 2.5 });
      p.text(x, y0 + 38, percent(share), { size: 11, fill: ink.muted });
    }
    const rank = String(ranksOf.data[i]), bits = entropy.data[i].toFixed(2) + " bits";
    if (narrow) p.text(left, y0 + 53, `${isolate(label(writes[t], 6))} is number ${rank}; entropy ${bits}`, { size: 11, fill: ink.muted });
    else { p.text(p.width - 92, y0 + 16, rank, { size: 13, anchor: "end" }); p.text(p.width, y0 + 16, bits, { size: 13, anchor: "end" }); }
  }
  p.reach(y + 30 + L * tall);
}

function lensWords() {
  const ranksOf = array("lens.rank"), written = array("lens.written"), [L, T] = ranksOf.shape, t = atPosition();
  let since = L - 1;
  while (since > 0 && ranksOf.data[(since - 1) * T + t] === 1) since--;
  const end = (L - 1) * T + t, first = since === 0 ? "from the embedding on" : `from layer ${since} on`;
  return ranksOf.data[end] === 1
    ? `${named(writes[t])} comes first ${first}, and is written with probability ${percent(written.data[end])}.`
    : `${named(writes[t])} is number ${ranksOf.data[end]} in the last layer, with probability ${percent(written.data[end])}: the model itself would not have chosen it here.`;
}

// ---------------------------------------------------------------- 7 erase

function erasing(p) {
  const { shape: [T, S], data } = array("erase"), t = atPosition(), layer = crossLayer(), head = crossHead(), beside = p.width >= 760, w = beside ? (p.width - 48) / 2 : p.width;
  const most = Math.max(1e-9, ...data), left = 62, cell = Math.min(56, (w - left - 18) / S), tall = Math.max(3, Math.min(cell, 34)), top = 86;
  const weights = Array.from({ length: T }, (_, i) => row("cross", layer, head, i, state.temperature));
  const grid = (x0, y0, title, under, colour, tip) => {
    p.text(x0, y0 + 14, title, { size: 15, weight: 600 });
    p.text(x0, y0 + 32, under, { size: 12, fill: ink.muted });
    source.forEach((token, j) => { if (cell >= 11 || j === state.key) p.text(x0 + left + j * cell + cell / 2 + 4, y0 + top - 6, isolate(label(token, 6)), { size: Math.min(12, Math.max(10, cell)), turn: -50, fill: ink.ink }); });
    writes.forEach((token, i) => { if (tall >= 10 || i === t) p.text(x0 + left - 8, y0 + top + i * tall + tall / 2 + 4, isolate(label(token, 6)), { size: Math.min(12, Math.max(10, tall)), anchor: "end", weight: i === t ? 700 : 400, fill: i === t ? ink.warm : ink.ink }); });
    p.map(x0 + left, y0 + top, S * cell, T * tall, S, T, cellMap(S, T, colour));
    p.rect(x0 + left - 0.5, y0 + top - 0.5, S * cell + 1, T * tall + 1, { stroke: ink.line });
    p.rect(x0 + left - 1, y0 + top + t * tall, S * cell + 2, tall, { stroke: ink.warm, width: 2, r: 2 });
    p.field(x0 + left, y0 + top, S * cell, T * tall, S, T, tip, (i, j) => select({ kind: "cross", query: i, key: j }));
  };
  grid(0, 0, "Attention", `layer ${number("cross", layer)}, head ${head + 1}; shade: square root of the weight`, (i, j) => visibleShade(weights[i][j]), (i, j) => `${named(writes[i])} looks at ${named(source[j])}: ${percent(weights[i][j])}`);
  const x1 = beside ? w + 48 : 0, y1 = beside ? 0 : top + T * tall + 34;
  grid(x1, y1, "Without the token", "fall of log-probability, measured; −: it rises", (i, j) => { const v = data[i * S + j]; return v >= 0 ? visibleShade(v / most) : mix(Math.max(-1, v / most) * 0.9); }, (i, j) => `Without ${named(source[j])} the log-probability of ${named(writes[i])} ${data[i * S + j] < 0 ? "rises" : "falls"} by ${Math.abs(data[i * S + j]).toFixed(3)} nats`);
  if (tall >= 14 && cell >= 22) for (let i = 0; i < T; i++) for (let j = 0; j < S; j++) if (data[i * S + j] < -0.02 * most) p.text(x1 + left + j * cell + cell / 2, y1 + top + i * tall + tall / 2 + 4, "−", { anchor: "middle", size: 12 });
  // The chosen output token: both side by side.
  const y2 = y1 + top + T * tall + 40, fall = Array.from(data.subarray(t * S, t * S + S)), own = Array.from(weights[t]);
  const shown = source.map((_, j) => j).sort((a, b) => Math.max(own[b], fall[b] / most) - Math.max(own[a], fall[a] / most)).slice(0, 12).sort((a, b) => a - b);
  const name = p.width < 560 ? 60 : 110, span = (p.width - name) / 2 - 66;
  p.text(0, y2, `For ${isolate(label(writes[t]))}` + (p.width < 560 ? "" : ": the source tokens that matter most by either measure"), { size: 14, weight: 600 });
  p.text(name, y2 + 24, "attention weight", { size: 12, fill: ink.muted });
  p.text(name + span + 66, y2 + 24, p.width < 560 ? "fall without it" : "fall of log-probability without it (nats)", { size: 12, fill: ink.muted });
  const high = Math.max(1e-9, ...fall.map(Math.abs)), digits = high < 0.05 ? 4 : 2;
  shown.forEach((j, n) => {
    const y = y2 + 48 + n * 25, x = name + span + 66;
    p.text(0, y, isolate(label(source[j], p.width < 560 ? 6 : 11)), { weight: j === state.key && state.kind === "cross" ? 700 : 400 });
    p.rect(name, y - 11, Math.max(1.5, span * own[j]), 13, { fill: ink.accent, r: 3 });
    p.text(name + span * own[j] + 7, y, percent(own[j]), { size: 12, fill: ink.muted });
    p.rect(x, y - 11, Math.max(1.5, span * Math.abs(fall[j]) / high), 13, { fill: fall[j] < 0 ? undefined : ink.warm, stroke: fall[j] < 0 ? ink.warm : undefined, dash: fall[j] < 0 ? [3, 2] : undefined, r: 3 });
    p.text(x + span * Math.abs(fall[j]) / high + 7, y, signed(fall[j], digits), { size: 12, fill: ink.muted });
  });
  p.reach(y2 + 48 + shown.length * 25);
}

/* Rank correlation of attention and erase test, a row at a time, and their mean over rows.
   No temperature changes the order of weights, so none changes this. */
const agreements = new Map();
function agreement(layer, head) {
  const place = layer * headsOf("cross") + head;
  if (!agreements.has(place)) {
    const { shape: [T, S], data } = array("erase"), rows = [];
    for (let i = 0; i < T; i++) rows.push(rankCorrelation(row("cross", layer, head, i, 1), data.subarray(i * S, i * S + S)));
    const real = rows.filter((v) => v !== null);
    agreements.set(place, { rows, mean: real.length ? total(real) / real.length : null });
  }
  return agreements.get(place);
}

function eraseWords() {
  const layer = crossLayer(), head = crossHead(), { rows, mean } = agreement(layer, head), t = atPosition(), say = (v) => v === null ? "not defined" : signed(v);
  let best = [-2, 0, 0];
  for (let l = 0; l < layersOf("cross").length; l++) for (let h = 0; h < headsOf("cross"); h++) { const m = agreement(l, h).mean; if (m !== null && m > best[0]) best = [m, l, h]; }
  return `Rank correlation at ${named(writes[t])}: ${say(rows[t])}; mean over the output: ${say(mean)} (1: the same order, 0: none). `
    + (best[0] > -2 ? `Of all heads, layer ${number("cross", best[1])}, head ${best[2] + 1} agrees best: ${say(best[0])}.` : "");
}

// ---------------------------------------------------------------- the page

const VIEWS = [
  { id: "spotlight", title: "Who attends to whom", draw: spotlight, words: null,
    lead: () => ({ cross: "Each token that is written, and small beside it the token read just before; joined to the source tokens that the decoder looks at meanwhile. Choose one.", encoder: "Each source token, joined to the source tokens it looks at. Choose one.", decoder: "Each token that is written, and small beside it the token read just before; joined to what was written so far. Later tokens are masked. Choose one." })[state.kind],
    care: () => "A line says where this head looked, not why the model decided. Each row adds up to 1, so something always gets weight." + (state.temperature === 1 ? "" : " Temperature: only these weights are changed. The layers above are not run again.") },
  { id: "heads", title: "Every layer, every head", draw: headMaps, words: headWords, needs: [],
    lead: () => "One map for each head: rows look, columns are looked at; darker is more (in the dark: brighter), by the square root of the weight. The bar below says how far the log-probability of the whole output falls when that head is switched off. Choose one.",
    care: () => "A head that changes nothing here may matter for other sentences." },
  { id: "vectors", title: "Query, key, value", draw: strips, words: stripWords, needs: ["vectors"],
    lead: () => "A query meets a key: they are multiplied dimension by dimension and added up, the sum is divided by the root of the head's width, and a softmax over all keys makes a weight of it. The value is what the weight lets through.",
    care: () => "Up is positive and down is negative. The numbers are those that this head's projections gave, so the weight can be checked against the model's own." },
  { id: "positions", title: "Positions", draw: waves, words: waveWords, needs: ["positions"], controls: positionControls,
    lead: () => "The numbers that this model adds to every embedding, read from the model itself. Fast waves tell neighbours apart, slow ones tell far from near.",
    care: () => "The table is drawn as stored, without the embeddings it is added to." },
  { id: "stream", title: "Residual stream, LayerNorm, feed-forward", draw: stream, words: streamWords, needs: ["stream", "units", "path"],
    lead: () => "What each sub-layer is given (x) and what it adds (f(x)): their lengths, the angle between them, and how LayerNorm changes the spread of the numbers.",
    care: () => "Two directions are a shadow of many dimensions: points that lie close here may be far apart." },
  { id: "lens", title: "Layer by layer", draw: lens, words: lensWords, needs: ["lens"],
    lead: () => "What the model's output projection reads in each decoder layer" + (header.final_norm ? ", after the final norm with that layer's own statistics" : "") + ". The last row is the prediction itself.",
    care: () => "Only the last layer was trained to be read this way. Earlier rows show how close a layer already is to an answer, not what it thinks." },
  { id: "erase", title: "Does attention explain it?", draw: erasing, words: eraseWords, needs: ["erase"],
    lead: () => "Left, where the head looked. Right, what happens when a source token is masked everywhere and everything is run again.",
    care: () => "This is a real rerun. It measures dependence on one token at a time; two tokens can stand in for each other." },
];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function positionControls() {
  const most = Math.floor(array("positions.decoder").shape[1] / 2) - 1;
  // A wave of about 32 positions to begin with.
  state.pair = Math.min(most, Math.round(most * Math.log(32 / (2 * Math.PI)) / Math.log(10000)));
  const slider = element("input", { type: "range", min: 0, max: Math.max(0, most), value: state.pair, oninput: () => select({ pair: +slider.value }) });
  return element("div", { class: "controls" }, element("label", {}, "pair of dimensions ", slider));
}

function build(view, place) {
  const heading = element("h2", { id: "title-" + view.id }, element("span", { class: "number" }, String(place + 1)), view.title);
  const section = element("section", { id: view.id, "aria-labelledby": "title-" + view.id }), head = element("header", {}, heading);
  section.append(head);
  const lacking = (view.needs || []).filter((name) => header.missing[name]);
  if (view.needs && view.needs.length && lacking.length === view.needs.length) {
    section.append(element("p", { class: "missing" }, `Not shown: ${header.missing[lacking[0]]}.`));
    return section;
  }
  head.append(element("span", { class: "saves" },
    element("button", { type: "button", "aria-label": `Save “${view.title}” as PNG`, onclick: () => savePNG(view) }, "PNG"),
    element("button", { type: "button", "aria-label": `Save “${view.title}” as SVG`, onclick: () => saveSVG(view) }, "SVG")));
  view.leadLine = element("p", { class: "lead" });
  view.canvas = element("canvas", { role: "img" });
  view.stage = element("div", { class: "stage" }, view.canvas);
  view.readout = view.words && element("p", { class: "readout" });
  view.careLine = element("p", { class: "care" });
  section.append(view.leadLine, ...(view.controls ? [view.controls()] : []), view.stage, ...(view.readout ? [view.readout] : []), view.careLine);
  view.buttons = [];
  view.canvas.addEventListener("pointermove", (event) => hover(view, event));
  view.canvas.addEventListener("pointerleave", hideTip);
  view.canvas.addEventListener("click", (event) => { const hit = fieldAt(view, event); if (hit && hit.field.choose) hit.field.choose(hit.i, hit.j); });
  return section;
}

function pictureOf(view, width) {
  const picture = new Picture(width);
  view.draw(picture);
  picture.height = Math.ceil(picture.height + 4);
  return picture;
}

function show(view) {
  if (!view.stage) return;
  const width = view.stage.clientWidth;
  if (!width) return;
  const picture = view.picture = pictureOf(view, width);
  paint(picture, view.canvas, Math.max(1, window.devicePixelRatio || 1));
  view.canvas.style.width = width + "px";
  view.canvas.style.height = picture.height + "px";
  const words = view.words ? view.words() : spotlightWords();
  put(view.leadLine, view.lead()); put(view.careLine, view.care());
  if (view.readout) put(view.readout, words);
  view.canvas.setAttribute("aria-label", view.title + ". " + words);
  placeButtons(view, picture.spots);
  view.dirty = false;
}
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };

/* Buttons stay the same elements, so that focus survives a redraw. */
function placeButtons(view, spots) {
  while (view.buttons.length > spots.length) view.buttons.pop().remove();
  spots.forEach((spot, i) => {
    let button = view.buttons[i];
    if (!button) {
      button = element("button", { type: "button", onclick: () => button.spot.choose(), onkeydown: (event) => walk(view, button, event),
        onfocus: () => { if (button.matches(":focus-visible")) tipAt(button.spot.tip, button.getBoundingClientRect()); }, onblur: hideTip,
        onpointerenter: () => tipAt(button.spot.tip, button.getBoundingClientRect()), onpointerleave: hideTip });
      view.buttons.push(button);
      view.stage.append(button);
    }
    button.spot = spot;
    const { style } = button;
    style.left = spot.x + "px"; style.top = spot.y + "px"; style.width = spot.w + "px"; style.height = spot.h + "px";
    button.setAttribute("aria-label", spot.label);
    button.setAttribute("aria-pressed", spot.pressed ? "true" : "false");
    button.style.background = "transparent";
    button.tabIndex = spot.pressed ? 0 : -1; // one stop a group; arrows go on from there
  });
}

/* Arrow keys walk from button to button of a group, and choose. */
function walk(view, button, event) {
  const { spot } = button, group = view.buttons.filter((other) => other.spot.group === spot.group);
  let goal = null;
  if (spot.group === "heads") {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (step) goal = group.find((other) => other.spot.row === spot.row + step[0] && other.spot.column === spot.column + step[1]);
    else return;
  } else {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) goal = group.find((other) => other.spot.column === spot.column + step);
    else if (event.key === "Home") goal = group[0];
    else if (event.key === "End") goal = group[group.length - 1];
    else return;
  }
  event.preventDefault();
  if (!goal) return;
  button.tabIndex = -1;
  goal.tabIndex = 0;
  goal.focus();
  goal.spot.choose();
}

function fieldAt(view, event) {
  const box = view.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const field = view.picture && view.picture.fields.find((f) => x >= f.x && x < f.x + f.w && y >= f.y && y < f.y + f.h);
  return field && { field, i: Math.floor((y - field.y) / field.h * field.rows), j: Math.floor((x - field.x) / field.w * field.columns) };
}

function hover(view, event) {
  const hit = fieldAt(view, event);
  view.canvas.style.cursor = hit && hit.field.choose ? "pointer" : "default";
  if (!hit) return hideTip();
  tipAt(hit.field.tip(hit.i, hit.j), { left: event.clientX, right: event.clientX, top: event.clientY - 6, bottom: event.clientY + 14 });
}

function tipAt(text, box) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = tip, room = document.documentElement.clientWidth;
  tip.style.left = Math.max(6, Math.min(room - w - 6, (box.left + box.right) / 2 - w / 2)) + "px";
  tip.style.top = (box.top - h - 8 > 0 ? box.top - h - 8 : box.bottom + 8) + "px";
}
function hideTip() { $("tip").hidden = true; }

let waiting = false;
function redraw() {
  syncBar();
  for (const view of VIEWS) view.dirty = true;
  if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; drawSeen(); }); }
}

/* What can be seen at once, the rest one after the other. */
function drawSeen() {
  const seen = (view) => { const box = view.stage && view.stage.getBoundingClientRect(); return box && box.top < innerHeight && box.bottom > 0; };
  for (const view of VIEWS) if (view.dirty && seen(view)) show(view);
  setTimeout(drawRest, 0);
}
function drawRest() {
  const view = VIEWS.find((v) => v.dirty && v.stage);
  if (!view) return;
  show(view);
  setTimeout(drawRest, 0);
}
function drawAll() { for (const view of VIEWS) show(view); }

function options(list, texts, value) {
  while (list.options.length > texts.length) list.remove(list.options.length - 1);
  texts.forEach((text, i) => { if (list.options[i]) put(list.options[i], text); else list.add(new Option(text, i)); });
  list.value = value;
}

function syncBar() {
  const { kind } = state, [rows, columns] = sides(kind);
  for (const button of $("kinds").children) button.setAttribute("aria-pressed", button.dataset.kind === kind ? "true" : "false");
  options($("layer"), layersOf(kind).map(String), state.layer);
  options($("head"), Array.from({ length: headsOf(kind) }, (_, h) => String(h + 1)), state.head);
  options($("query"), rows.map((token, i) => `${i + 1} ${isolate(label(token))}`), state.query);
  options($("key"), columns.map((token, j) => `${j + 1} ${isolate(label(token))}`), state.key);
  for (const [j, option] of Array.from($("key").options).entries()) option.disabled = masked(kind, state.layer, state.head, state.query, j);
  $("temperature").value = Math.log2(state.temperature);
  $("temperature").setAttribute("aria-valuetext", state.temperature.toFixed(2));
  put($("degrees"), state.temperature.toFixed(2));
  put($("say"), spotlightWords());
}

// ---------------------------------------------------------------- saving

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/* The view on its own, with its title, its sentence and its caption. */
function framed(view) {
  const margin = 32, inner = pictureOf(view, Math.max(640, Math.min(1056, view.stage.clientWidth))), p = new Picture(inner.width + 2 * margin);
  const lines = [view.title + ": " + header.source_text.slice(0, 60) + " → " + header.target_text.slice(0, 60)];
  p.shapes.push({ is: "rect", x: 0, y: 0, w: p.width, h: 0, fill: ink.card });
  p.text(margin, margin + 12, lines[0], { size: 16, weight: 600 });
  const y = margin + 36;
  for (const shape of inner.shapes) p.shapes.push(across(moved(shape, y), margin));
  let end = y + inner.height + 22;
  for (const line of [...wrapped(view.words ? view.words() : spotlightWords(), inner.width, 13), ...wrapped(view.care(), inner.width, 13), facts()]) {
    p.text(margin, end, line, { size: 13, fill: ink.muted });
    end += 20;
  }
  p.height = p.shapes[0].h = Math.ceil(end + margin - 16);
  return p;
}
function across(shape, dx) {
  if (shape.is !== "path") return { ...shape, x: shape.x + dx };
  return { ...shape, d: shape.d.replace(/([MLC])([^A-Za-z]+)/g, (_, letter, list) => letter + list.trim().split(/[\s,]+/).map((v, i) => i % 2 ? v : +v + dx).join(",")) };
}

function savePNG(view) {
  const canvas = document.createElement("canvas");
  paint(framed(view), canvas, 2);
  canvas.toBlob((blob) => save(blob, view.id + ".png"));
}
const saveSVG = (view) => save(new Blob([svgOf(framed(view), view.title)], { type: "image/svg+xml" }), view.id + ".svg");
const saveJSON = () => save(new Blob([JSON.stringify({ ...header, data: $("data").textContent })], { type: "application/json" }), "trace.json");

// ---------------------------------------------------------------- start

function facts() {
  const c = header.config, m = header.model, heads = headsOf("cross"), norm = header.norm ? (header.norm === "post" ? "Post-Norm" : "Pre-Norm") : null;
  return [m.name, norm, `${c.encoder_layers || layersOf("encoder").length} + ${c.decoder_layers || layersOf("decoder").length} layers`, `${heads} heads`, c.d_model && `d ${c.d_model}`, m.parameters.toLocaleString("en") + " parameters",
    m.dtype === "float32" ? null : m.dtype, header.target_given ? "output given, not generated" : null].filter(Boolean).join(" · ");
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", dark ? "true" : "false");
  readColours();
}

async function start() {
  const begin = performance.now();
  await unpack();
  const night = matchMedia("(prefers-color-scheme: dark)");
  theme(night.matches);
  night.addEventListener("change", () => { theme(night.matches); redraw(); });
  put($("facts"), facts());
  $("page").hidden = false;
  // Begin where a head matters: the last layer's, by its switch-off effect.
  state.layer = layersOf("cross").length - 1;
  const off = array("off.cross");
  if (off) {
    const [, H, T] = off.shape, effect = Array.from({ length: H }, (_, h) => total(Array.from(off.data.subarray((state.layer * H + h) * T, (state.layer * H + h + 1) * T))));
    state.head = effect.indexOf(Math.max(...effect));
  }
  state.query = Math.min(1, writes.length - 1);
  const first = row("cross", state.layer, state.head, state.query, 1);
  state.key = first.indexOf(Math.max(...first));
  clamp();
  $("views").append(...VIEWS.map(build));
  for (const button of $("kinds").children) button.addEventListener("click", () => select({ kind: button.dataset.kind }));
  for (const name of ["layer", "head", "query", "key"]) $(name).addEventListener("change", (event) => select({ [name]: +event.target.value }));
  $("temperature").addEventListener("input", (event) => select({ temperature: 2 ** +event.target.value }));
  $("reset").addEventListener("click", () => select({ temperature: 1 }));
  $("theme").addEventListener("click", () => { theme(document.documentElement.dataset.theme !== "dark"); redraw(); });
  $("json").addEventListener("click", saveJSON);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  let before = false;
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme === "dark"; theme(false); drawAll(); });
  addEventListener("afterprint", () => { theme(before); drawAll(); });
  syncBar();
  drawAll();
  explorer.ready = performance.now() - begin;
  document.documentElement.dataset.ready = "true";
}

/* For whoever wants to check a number, in the console or in a test. */
const explorer = { header, state, select, row, array, vector, meeting, agreement, rankCorrelation, drawAll, drawSeen, times: () => VIEWS.map((v) => { const from = performance.now(); show(v); return [v.id, performance.now() - from]; }), svg: (id) => svgOf(framed(VIEWS.find((v) => v.id === id)), id), ready: null };
window.explorer = explorer;

start().catch((error) => {
  $("failure").textContent = `The numbers in this file cannot be read: ${error.message}. It needs a browser of 2023 or later.`;
  $("failure").hidden = false;
  throw error;
});
})();
