/* The explorer page: one trace, seven views, one selection. No library, no network.

   It runs after explorer_drawing.js and explorer_views.js, in one script with them. Text gets into
   the page as text only. */

// The page

const VIEWS = [
  {
    id: "spotlight",
    title: "Who attends to whom",
    draw: spotlight,
    words: null,
    lead: () =>
      ({
        cross:
          "Each token that is written, and small beside it the token read just before; joined to the source tokens that the decoder looks at meanwhile. Choose one.",
        encoder: "Each source token, joined to the source tokens it looks at. Choose one.",
        decoder:
          "Each token that is written, and small beside it the token read just before; joined to what was written so far. Later tokens are masked. Choose one.",
      })[state.kind],
    care: () =>
      "A line says where this head looked, not why the model decided. Each row adds up to 1, so something always gets weight." +
      (state.temperature === 1
        ? ""
        : " Temperature: only these weights are changed. The layers above are not run again."),
  },
  {
    id: "heads",
    title: "Every layer, every head",
    draw: headMaps,
    words: headWords,
    needs: [],
    lead: () =>
      "One map for each head: rows look, columns are looked at; darker is more (in the dark: brighter), by the square root of the weight." +
      (array("off." + state.kind)
        ? " The bar below says how far the log-probability of the whole output falls when that head is switched off."
        : "") +
      " Choose one.",
    care: () =>
      array("off." + state.kind)
        ? "A head that changes nothing here may matter for other sentences."
        : "A map says where a head looks, not whether the output needs it: no head was switched off for this page.",
  },
  {
    id: "vectors",
    title: "Query, key, value",
    draw: strips,
    words: stripWords,
    needs: ["vectors"],
    lead: () =>
      "A query meets a key: they are multiplied dimension by dimension and added up, the sum is divided by the root of the head's width, and a softmax over all keys makes a weight of it. The value is what the weight lets through.",
    care: () =>
      "Up is positive and down is negative. The numbers are those that this head's projections gave, so the weight can be checked against the model's own.",
  },
  {
    id: "positions",
    title: "Positions",
    draw: waves,
    words: waveWords,
    needs: ["positions"],
    controls: positionControls,
    lead: () =>
      "The numbers that this model adds to every embedding, read from the model itself. Fast waves tell neighbours apart, slow ones tell far from near.",
    care: () => "The table is drawn as stored, without the embeddings it is added to.",
  },
  {
    id: "stream",
    title: "Residual stream, LayerNorm, feed-forward",
    draw: stream,
    words: streamWords,
    needs: ["stream", "units", "path"],
    lead: () =>
      "What each sub-layer is given (x) and what it adds (f(x)): their lengths, the angle between them, and how LayerNorm changes the spread of the numbers.",
    care: () =>
      "Two directions are a shadow of many dimensions: points that lie close here may be far apart.",
  },
  {
    id: "lens",
    title: "Layer by layer",
    draw: lens,
    words: lensWords,
    needs: ["lens"],
    lead: () =>
      "What the model's output projection reads in each decoder layer" +
      (header.final_norm ? ", after the final norm with that layer's own statistics" : "") +
      ". The last row is the prediction itself.",
    care: () =>
      "Only the last layer was trained to be read this way. Earlier rows show how close a layer already is to an answer, not what it thinks.",
  },
  {
    id: "erase",
    title: "Does attention explain it?",
    draw: erasing,
    words: eraseWords,
    needs: ["erase"],
    lead: () =>
      "Left, where the head looked. Right, what happens when a source token is masked everywhere and everything is run again.",
    care: () =>
      "This is a real rerun. It measures dependence on one token at a time; two tokens can stand in for each other.",
  },
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
  state.pair = Math.min(most, Math.round((most * Math.log(32 / (2 * Math.PI))) / Math.log(10000)));
  const slider = element("input", {
    type: "range",
    min: 0,
    max: Math.max(0, most),
    value: state.pair,
    oninput: () => select({ pair: +slider.value }),
  });
  return element("div", { class: "controls" }, element("label", {}, "pair of dimensions ", slider));
}

function build(view, place) {
  const heading = element(
    "h2",
    { id: "title-" + view.id },
    element("span", { class: "number" }, String(place + 1)),
    view.title,
  );
  const section = element("section", { id: view.id, "aria-labelledby": "title-" + view.id }),
    head = element("header", {}, heading);
  section.append(head);
  const lacking = (view.needs || []).filter((name) => header.missing[name]);
  if (view.needs && view.needs.length && lacking.length === view.needs.length) {
    section.append(element("p", { class: "missing" }, `Not shown: ${header.missing[lacking[0]]}.`));
    return section;
  }
  head.append(
    element(
      "span",
      { class: "saves" },
      element(
        "button",
        {
          type: "button",
          "aria-label": `Save “${view.title}” as PNG`,
          onclick: () => savePNG(view),
        },
        "PNG",
      ),
      element(
        "button",
        {
          type: "button",
          "aria-label": `Save “${view.title}” as SVG`,
          onclick: () => saveSVG(view),
        },
        "SVG",
      ),
    ),
  );
  view.leadLine = element("p", { class: "lead" });
  view.canvas = element("canvas", { role: "img" });
  view.stage = element("div", { class: "stage" }, view.canvas);
  view.readout = view.words && element("p", { class: "readout" });
  view.careLine = element("p", { class: "care" });
  section.append(
    view.leadLine,
    ...(view.controls ? [view.controls()] : []),
    view.stage,
    ...(view.readout ? [view.readout] : []),
    view.careLine,
  );
  view.buttons = [];
  view.canvas.addEventListener("pointermove", (event) => hover(view, event));
  view.canvas.addEventListener("pointerleave", hideTip);
  view.canvas.addEventListener("click", (event) => {
    const hit = fieldAt(view, event);
    if (hit && hit.field.choose) hit.field.choose(hit.i, hit.j);
  });
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
  const picture = (view.picture = pictureOf(view, width));
  paint(picture, view.canvas, Math.max(1, window.devicePixelRatio || 1));
  view.canvas.style.width = width + "px";
  view.canvas.style.height = picture.height + "px";
  const words = view.words ? view.words() : spotlightWords();
  put(view.leadLine, view.lead());
  put(view.careLine, view.care());
  if (view.readout) put(view.readout, words);
  view.canvas.setAttribute("aria-label", view.title + ". " + words);
  placeButtons(view, picture.spots);
  view.dirty = false;
}
const put = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

/* Buttons stay the same elements, so that focus survives a redraw. */
function placeButtons(view, spots) {
  while (view.buttons.length > spots.length) view.buttons.pop().remove();
  spots.forEach((spot, i) => {
    let button = view.buttons[i];
    if (!button) {
      button = element("button", {
        type: "button",
        onclick: () => button.spot.choose(),
        onkeydown: (event) => walk(view, button, event),
        onfocus: () => {
          if (button.matches(":focus-visible"))
            tipAt(button.spot.tip, button.getBoundingClientRect());
        },
        onblur: hideTip,
        onpointerenter: () => tipAt(button.spot.tip, button.getBoundingClientRect()),
        onpointerleave: hideTip,
      });
      view.buttons.push(button);
      view.stage.append(button);
    }
    button.spot = spot;
    const { style } = button;
    style.left = spot.x + "px";
    style.top = spot.y + "px";
    style.width = spot.w + "px";
    style.height = spot.h + "px";
    button.setAttribute("aria-label", spot.label);
    button.setAttribute("aria-pressed", spot.pressed ? "true" : "false");
    button.tabIndex = spot.pressed ? 0 : -1; // one stop a group; arrows go on from there
  });
}

/* Arrow keys walk from button to button of a group, and choose. */
function walk(view, button, event) {
  const { spot } = button,
    group = view.buttons.filter((other) => other.spot.group === spot.group);
  let goal = null;
  if (spot.group === "heads") {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[
      event.key
    ];
    if (step)
      goal = group.find(
        (other) =>
          other.spot.row === spot.row + step[0] && other.spot.column === spot.column + step[1],
      );
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
  const box = view.canvas.getBoundingClientRect(),
    x = event.clientX - box.left,
    y = event.clientY - box.top;
  const field =
    view.picture &&
    view.picture.fields.find((f) => x >= f.x && x < f.x + f.w && y >= f.y && y < f.y + f.h);
  return (
    field && {
      field,
      i: Math.floor(((y - field.y) / field.h) * field.rows),
      j: Math.floor(((x - field.x) / field.w) * field.columns),
    }
  );
}

function hover(view, event) {
  const hit = fieldAt(view, event);
  view.canvas.style.cursor = hit && hit.field.choose ? "pointer" : "default";
  if (!hit) return hideTip();
  tipAt(hit.field.tip(hit.i, hit.j), {
    left: event.clientX,
    right: event.clientX,
    top: event.clientY - 6,
    bottom: event.clientY + 14,
  });
}

function tipAt(text, box) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = tip,
    room = document.documentElement.clientWidth;
  tip.style.left = Math.max(6, Math.min(room - w - 6, (box.left + box.right) / 2 - w / 2)) + "px";
  tip.style.top = (box.top - h - 8 > 0 ? box.top - h - 8 : box.bottom + 8) + "px";
}
function hideTip() {
  $("tip").hidden = true;
}

let waiting = false;
function redraw() {
  syncBar();
  for (const view of VIEWS) view.dirty = true;
  if (!waiting) {
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawSeen();
    });
  }
}

/* What can be seen at once, the rest one after the other. */
function drawSeen() {
  const seen = (view) => {
    const box = view.stage && view.stage.getBoundingClientRect();
    return box && box.top < innerHeight && box.bottom > 0;
  };
  for (const view of VIEWS) if (view.dirty && seen(view)) show(view);
  setTimeout(drawRest, 0);
}
function drawRest() {
  const view = VIEWS.find((v) => v.dirty && v.stage);
  if (!view) return;
  show(view);
  setTimeout(drawRest, 0);
}
function drawAll() {
  for (const view of VIEWS) show(view);
}

function options(list, texts, value) {
  while (list.options.length > texts.length) list.remove(list.options.length - 1);
  texts.forEach((text, i) => {
    if (list.options[i]) put(list.options[i], text);
    else list.add(new Option(text, i));
  });
  list.value = value;
}

function syncBar() {
  const { kind } = state,
    [rows, columns] = sides(kind);
  for (const button of $("kinds").children)
    button.setAttribute("aria-pressed", button.dataset.kind === kind ? "true" : "false");
  options($("layer"), layersOf(kind).map(String), state.layer);
  options(
    $("head"),
    Array.from({ length: headsOf(kind) }, (_, h) => String(h + 1)),
    state.head,
  );
  options(
    $("query"),
    rows.map((token, i) => `${i + 1} ${isolate(label(token))}`),
    state.query,
  );
  options(
    $("key"),
    columns.map((token, j) => `${j + 1} ${isolate(label(token))}`),
    state.key,
  );
  for (const [j, option] of Array.from($("key").options).entries())
    option.disabled = masked(kind, state.layer, state.head, state.query, j);
  $("temperature").value = Math.log2(state.temperature);
  $("temperature").setAttribute("aria-valuetext", state.temperature.toFixed(2));
  put($("degrees"), state.temperature.toFixed(2));
  put($("say"), spotlightWords());
}

// Saving

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/* The view on its own, with its title, its sentence and its caption. */
function framed(view) {
  const margin = 32,
    inner = pictureOf(view, Math.max(640, Math.min(1056, view.stage.clientWidth))),
    p = new Picture(inner.width + 2 * margin);
  const sentence = `${header.source_text.slice(0, 60)} → ${header.target_text.slice(0, 60)}`;
  p.shapes.push({ is: "rect", x: 0, y: 0, w: p.width, h: 0, fill: ink.card });
  p.text(margin, margin + 12, `${view.title} · ${sentence}`, { size: 16, weight: 600 });
  const y = margin + 36;
  for (const shape of inner.shapes) p.shapes.push(moved(shape, margin, y));
  let end = y + inner.height + 22;
  for (const line of [
    ...wrapped(view.words ? view.words() : spotlightWords(), inner.width, 13),
    ...wrapped(view.care(), inner.width, 13),
    facts(),
  ]) {
    p.text(margin, end, line, { size: 13, fill: ink.muted });
    end += 20;
  }
  p.height = p.shapes[0].h = Math.ceil(end + margin - 16);
  return p;
}

function savePNG(view) {
  const canvas = document.createElement("canvas");
  paint(framed(view), canvas, 2);
  canvas.toBlob((blob) => save(blob, view.id + ".png"));
}
const saveSVG = (view) =>
  save(new Blob([svgOf(framed(view), view.title)], { type: "image/svg+xml" }), view.id + ".svg");
const saveJSON = () =>
  save(
    new Blob([JSON.stringify({ ...header, data: $("data").textContent })], {
      type: "application/json",
    }),
    "trace.json",
  );

// Start

function facts() {
  const c = header.config,
    m = header.model,
    heads = headsOf("cross"),
    norm = header.norm ? (header.norm === "post" ? "Post-Norm" : "Pre-Norm") : null;
  return [
    m.name,
    norm,
    `${c.encoder_layers || layersOf("encoder").length} + ${c.decoder_layers || layersOf("decoder").length} layers`,
    `${heads} heads`,
    c.d_model && `d ${c.d_model}`,
    m.parameters.toLocaleString("en") + " parameters",
    m.dtype === "float32" ? null : m.dtype,
    header.target_given ? "output given, not generated" : null,
  ]
    .filter(Boolean)
    .join(" · ");
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
  night.addEventListener("change", () => {
    theme(night.matches);
    redraw();
  });
  put($("facts"), facts());
  $("page").hidden = false;
  // Begin where a head matters: the last layer's, by its switch-off effect.
  state.layer = layersOf("cross").length - 1;
  const off = array("off.cross");
  if (off) {
    const [, H, T] = off.shape,
      effect = Array.from({ length: H }, (_, h) =>
        total(
          Array.from(off.data.subarray((state.layer * H + h) * T, (state.layer * H + h + 1) * T)),
        ),
      );
    state.head = effect.indexOf(Math.max(...effect));
  }
  state.query = Math.min(1, writes.length - 1);
  const first = row("cross", state.layer, state.head, state.query, 1);
  state.key = first.indexOf(Math.max(...first));
  clamp();
  $("views").append(...VIEWS.map(build));
  for (const button of $("kinds").children)
    button.addEventListener("click", () => select({ kind: button.dataset.kind }));
  for (const name of ["layer", "head", "query", "key"])
    $(name).addEventListener("change", (event) => select({ [name]: +event.target.value }));
  $("temperature").addEventListener("input", (event) =>
    select({ temperature: 2 ** +event.target.value }),
  );
  $("reset").addEventListener("click", () => select({ temperature: 1 }));
  $("theme").addEventListener("click", () => {
    theme(document.documentElement.dataset.theme !== "dark");
    redraw();
  });
  $("json").addEventListener("click", saveJSON);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      redraw();
    }
  });
  let before = false;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme === "dark";
    theme(false);
    drawAll();
  });
  addEventListener("afterprint", () => {
    theme(before);
    drawAll();
  });
  syncBar();
  drawAll();
  explorer.ready = performance.now() - begin;
  document.documentElement.dataset.ready = "true";
}

/* For whoever wants to check a number, in the console or in a test. */
const explorer = {
  header,
  state,
  select,
  row,
  array,
  vector,
  meeting,
  agreement,
  rankCorrelation,
  drawAll,
  drawSeen,
  times: () =>
    VIEWS.map((v) => {
      const from = performance.now();
      show(v);
      return [v.id, performance.now() - from];
    }),
  svg: (id) => svgOf(framed(VIEWS.find((v) => v.id === id)), id),
  ready: null,
};
window.explorer = explorer;

start().catch((error) => {
  $("failure").textContent =
    `The numbers in this file cannot be read: ${error.message}. It needs a browser of 2023 or later.`;
  $("failure").hidden = false;
  throw error;
});
