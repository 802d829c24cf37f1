"use strict";
/* What every view needs: the trace's numbers, its words, colours, pictures, and the selection.

   A view draws into a Picture, a list of shapes, which becomes a canvas on the page, a PNG or an
   SVG. What can be reached in it is a button over the canvas, or a field of cells for the mouse
   that the selectors above reach, too. */

const KINDS = ["cross", "encoder", "decoder"];
const MASKED = 65535,
  FINE = 65534 / 32,
  FINE_END = Math.floor(24 * FINE + 0.5),
  COARSE = 128; // explorer.py
const LINES_UP_TO = 24; // tokens on a side that are joined by lines; more are two shaded texts
const SANS =
  getComputedStyle(document.documentElement).getPropertyValue("--sans").trim() || "sans-serif";
const $ = (id) => document.getElementById(id);
const header = JSON.parse($("trace").textContent);
const reads = header.read,
  writes = header.write,
  source = header.source;
const vocabulary = new Map(header.vocabulary.map((token) => [token.id, token]));
let bytes;

// Numbers

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
const sides = (kind) =>
  ({ cross: [writes, source], encoder: [source, source], decoder: [writes, reads] })[kind];

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
  const {
    shape: [, H, Q, K],
    data,
  } = array("attention." + kind);
  const of = power(t),
    first = ((layer * H + head) * Q + query) * K,
    weights = new Float64Array(K);
  let sum = 0;
  for (let k = 0; k < K; k++) sum += weights[k] = of[data[first + k]];
  if (t !== 1) for (let k = 0; k < K; k++) weights[k] /= sum;
  return weights;
}

function masked(kind, layer, head, query, key) {
  const {
    shape: [, H, Q, K],
    data,
  } = array("attention." + kind);
  return data[((layer * H + head) * Q + query) * K + key] === MASKED;
}

function vector(name, layer, token, head) {
  const {
      shape: [, T, H, E],
      data,
    } = array(name),
    scale = array(name + ".scale").data;
  const place = (layer * T + token) * H + head;
  return Array.from(data.subarray(place * E, place * E + E), (v) => v * scale[place]);
}

const total = (values) => values.reduce((a, b) => a + b, 0);
const dot = (x, y) => total(x.map((v, i) => v * y[i]));

/* Query meets keys: scores, and the weight that they give by softmax. */
function meeting(kind, layer, head, query) {
  const q = vector("query." + kind, layer, query, head);
  const keys = sides(kind)[1];
  const scores = keys.map((_, k) =>
    masked(kind, layer, head, query, k)
      ? -Infinity
      : dot(q, vector("key." + kind, layer, k, head)) / Math.sqrt(q.length),
  );
  const top = Math.max(...scores),
    powered = scores.map((s) => Math.exp(s - top)),
    sum = total(powered);
  return { q, scores, weights: powered.map((p) => p / sum) };
}

function ranks(values) {
  const order = Array.from(values.keys()).sort((a, b) => values[a] - values[b]),
    found = [];
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
  const a = ranks(Array.from(x)),
    b = ranks(Array.from(y)),
    mean = (a.length - 1) / 2;
  let ab = 0,
    aa = 0,
    bb = 0;
  for (let i = 0; i < a.length; i++) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) ** 2;
    bb += (b[i] - mean) ** 2;
  }
  return aa && bb ? ab / Math.sqrt(aa * bb) : null;
}

// Words

const segmenter = Intl.Segmenter ? new Intl.Segmenter("en", { granularity: "grapheme" }) : null;
const graphemes = (text) =>
  segmenter ? Array.from(segmenter.segment(text), (part) => part.segment) : Array.from(text);
const label = (token, most = 12) => {
  const parts = graphemes(token.shown);
  return parts.length > most ? parts.slice(0, most - 1).join("") + "…" : token.shown;
};
const isolate = (text) => "\u2068" + text + "\u2069"; // a token's direction stays its own
const named = (token) => "“" + isolate(token.shown) + "”";
const percent = (w) =>
  (w === 0 || w >= 0.0995 ? Math.round(w * 100) : w < 0.0005 ? "<0.1" : (w * 100).toFixed(1)) +
  " %";
const signed = (value, digits = 2) =>
  (value < 0 && +value.toFixed(digits) !== 0 ? "−" : "") + Math.abs(value).toFixed(digits);
const count = (number, word) => number + " " + word + (number === 1 ? "" : "s");

function queryWords(kind, query) {
  return kind === "encoder"
    ? named(source[query])
    : `having read ${named(reads[query])}, writes ${named(writes[query])}`;
}

// Colours

let ink = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue("--" + name).trim();
  ink = {};
  for (const name of [
    "paper",
    "card",
    "ink",
    "muted",
    "faint",
    "line",
    "soft",
    "accent",
    "accent-ink",
    "warm",
    "before",
  ])
    ink[name] = css(name);
  ink.positive = `rgb(${css("positive")})`;
  ink.negative = `rgb(${css("negative")})`;
  const rgb = (text) => text.split(",").map(Number);
  ink.plus = rgb(css("positive"));
  ink.minus = rgb(css("negative"));
  const stops = css("ramp").split("/").map(rgb);
  ink.ramp = Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (stops.length - 1),
      n = Math.min(Math.floor(place), stops.length - 2);
    return stops[n].map((v, c) => Math.round(v + (stops[n + 1][c] - v) * (place - n)));
  });
  ink.zero = stops[0];
}
const shade = (v) => ink.ramp[Math.max(0, Math.min(255, Math.round(v * 255)))];
const rgb = ([r, g, b]) => `rgb(${r},${g},${b})`;
const visibleShade = (w) => shade(Math.sqrt(Math.max(0, w))); // so that small weights can be seen
const luminance = (colour) => {
  const [r, g, b] = colour.map((v) =>
    (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const readableOn = (colour) => (luminance(colour) > 0.179 ? "#000000" : "#ffffff");

// Pictures

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
const font = (size, weight) => `${weight || 400} ${size}px ${SANS}`;
function widthOf(text, size = 14, weight = 400) {
  const key = size + "/" + weight + "/" + text;
  let width = widths.get(key);
  if (width === undefined) {
    pen.font = font(size, weight);
    widths.set(key, (width = pen.measureText(text).width));
  }
  return width;
}

function wrapped(text, width, size) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const line = lines[lines.length - 1],
      longer = line ? line + " " + word : word;
    if (line && widthOf(longer, size) > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

class Picture {
  constructor(width) {
    Object.assign(this, { width, height: 0, shapes: [], spots: [], fields: [] });
  }
  reach(y) {
    this.height = Math.max(this.height, y);
  }
  rect(x, y, w, h, look) {
    this.shapes.push({ is: "rect", x, y, w, h, ...look });
    this.reach(y + h);
  }
  path(d, look) {
    this.shapes.push({ is: "path", d, ...look });
  }
  dot(x, y, r, look) {
    this.path(`M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`, look);
  }
  line(x1, y1, x2, y2, look) {
    this.path(`M${x1},${y1}L${x2},${y2}`, look);
  }
  text(x, y, text, look = {}) {
    this.shapes.push({ is: "text", x, y, text, size: 14, fill: ink.ink, anchor: "start", ...look });
    this.reach(y + 4);
  }
  /* A map of cells: colours [rows x columns x 4]. */
  map(x, y, w, h, columns, rows, colours) {
    this.shapes.push({ is: "map", x, y, w, h, columns, rows, colours });
    this.reach(y + h);
  }
  /* What can be chosen by button: group, row and column say where the arrow keys go. */
  spot(x, y, w, h, spot) {
    this.spots.push({ x, y, w, h, ...spot });
  }
  /* Cells for the mouse. */
  field(x, y, w, h, columns, rows, tip, choose) {
    this.fields.push({ x, y, w, h, columns, rows, tip, choose });
  }
  chip(x, y, w, h, text, look) {
    this.rect(x, y, w, h, { r: 8, ...look });
    this.text(x + w / 2, y + h / 2 + 5, text, {
      anchor: "middle",
      size: look.size || 14,
      weight: look.weight,
      fill: look.ink || ink.ink,
    });
  }
}

function cellMap(columns, rows, colour) {
  const colours = new Uint8ClampedArray(columns * rows * 4);
  for (let i = 0, at = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) {
      const c = colour(i, j);
      colours[at++] = c[0];
      colours[at++] = c[1];
      colours[at++] = c[2];
      colours[at++] = 255;
    }
  return colours;
}

function mapImage({ columns, rows, colours }) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  canvas.getContext("2d").putImageData(new ImageData(colours, columns, rows), 0, 0);
  return canvas;
}

const rounded = ({ x, y, w, h, r = 0 }) => {
  r = Math.min(r, w / 2, h / 2);
  return r > 0
    ? `M${x + r},${y}h${w - 2 * r}a${r},${r} 0 0 1 ${r},${r}v${h - 2 * r}a${r},${r} 0 0 1 ${-r},${r}h${2 * r - w}a${r},${r} 0 0 1 ${-r},${-r}v${2 * r - h}a${r},${r} 0 0 1 ${r},${-r}Z`
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
        c.save();
        c.translate(shape.x, shape.y);
        c.rotate((shape.turn * Math.PI) / 180);
        c.fillText(shape.text, 0, 0);
        c.restore();
      } else c.fillText(shape.text, shape.x, shape.y);
    } else if (shape.is === "map") {
      c.imageSmoothingEnabled = false;
      c.drawImage(mapImage(shape), shape.x, shape.y, shape.w, shape.h);
    } else if (shape.is === "rect" && !shape.r && !shape.stroke) {
      c.fillStyle = shape.fill;
      c.fillRect(shape.x, shape.y, shape.w, shape.h);
    } else {
      const outline = new Path2D(shape.is === "rect" ? rounded(shape) : shape.d);
      if (shape.fill) {
        c.fillStyle = shape.fill;
        c.fill(outline);
      }
      if (shape.stroke) {
        c.strokeStyle = shape.stroke;
        c.lineWidth = shape.width || 1;
        c.lineCap = "round";
        c.lineJoin = "round";
        c.setLineDash(shape.dash || []);
        c.stroke(outline);
        c.setLineDash([]);
      }
    }
  }
}

const XML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => XML[c]);
const short = (v) => Math.round(v * 100) / 100;

function svgOf(picture, title) {
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${short(picture.width)}" height="${short(picture.height)}" viewBox="0 0 ${short(picture.width)} ${short(picture.height)}"><title>${escaped(title)}</title>`,
  ];
  const common = (s) =>
    (s.opacity === undefined ? "" : ` opacity="${short(s.opacity)}"`) +
    ` fill="${s.fill || "none"}"` +
    (s.stroke
      ? ` stroke="${s.stroke}" stroke-width="${short(s.width || 1)}" stroke-linecap="round" stroke-linejoin="round"`
      : "") +
    (s.dash ? ` stroke-dasharray="${s.dash.join(" ")}"` : "");
  for (const s of picture.shapes) {
    if (s.is === "rect") {
      parts.push(
        `<rect x="${short(s.x)}" y="${short(s.y)}" width="${short(s.w)}" height="${short(s.h)}"${s.r ? ` rx="${s.r}"` : ""}${common(s)}/>`,
      );
    } else if (s.is === "path") {
      parts.push(`<path d="${s.d.replace(/-?\d+\.\d{3,}/g, (v) => short(+v))}"${common(s)}/>`);
    } else if (s.is === "map") {
      parts.push(
        `<image x="${short(s.x)}" y="${short(s.y)}" width="${short(s.w)}" height="${short(s.h)}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${mapImage(s).toDataURL()}"/>`,
      );
    } else {
      const turn = s.turn ? ` transform="rotate(${s.turn} ${short(s.x)} ${short(s.y)})"` : "";
      parts.push(
        `<text x="${short(s.x)}" y="${short(s.y)}" font-family="${escaped(SANS)}" font-size="${s.size}"${s.weight ? ` font-weight="${s.weight}"` : ""} text-anchor="${s.anchor}" direction="ltr" unicode-bidi="isolate"${turn}${common(s)} xml:space="preserve">${escaped(s.text)}</text>`,
      );
    }
  }
  return parts.join("\n") + "\n</svg>\n";
}

// The same shape elsewhere. Of the letters that paths here use, M, L and C hold absolute pairs.
function moved(shape, dx, dy) {
  if (shape.is !== "path") return { ...shape, x: shape.x + dx, y: shape.y + dy };
  const pairs = (_, letter, list) =>
    letter +
    list
      .trim()
      .split(/[\s,]+/)
      .map((v, i) => +v + (i % 2 ? dy : dx))
      .join(",");
  return { ...shape, d: shape.d.replace(/([MLC])([^A-Za-z]+)/g, pairs) };
}

// Selection

const state = { kind: "cross", layer: 0, head: 0, query: 0, key: 0, temperature: 1, pair: 0 };
// Decoder positions and source tokens that were chosen last, for views that need the other side.
const last = { read: 0, source: 0, cross: 0 };
const number = (kind = state.kind, layer = state.layer) => layersOf(kind)[layer];
const atPosition = () => Math.min(last.read, writes.length - 1);
const crossLayer = () =>
  state.kind === "encoder" ? Math.min(last.cross, layersOf("cross").length - 1) : state.layer;
const crossHead = () => Math.min(state.head, headsOf("cross") - 1);

function clamp() {
  const [rows, columns] = sides(state.kind),
    within = (v, n) => Math.max(0, Math.min(n - 1, v));
  state.layer = within(state.layer, layersOf(state.kind).length);
  state.head = within(state.head, headsOf(state.kind));
  state.query = within(state.query, rows.length);
  state.key = within(state.key, columns.length);
  if (masked(state.kind, state.layer, state.head, state.query, state.key)) state.key = state.query;
  if (state.kind !== "encoder") {
    last.read = state.query;
    last.cross = state.layer;
  } else last.source = state.query;
}

function select(change) {
  if (change.kind && change.kind !== state.kind && change.query === undefined) {
    state.query = change.kind === "encoder" ? last.source : last.read;
  }
  Object.assign(state, change);
  clamp();
  redraw();
}
