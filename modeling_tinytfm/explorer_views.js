/* The seven views: each draws into a Picture, and says in words what is selected. */

// View 1: who attends to whom

const chipWidth = (text, size = 14, weight = 400) => Math.max(34, widthOf(text, size, weight) + 22);
function fitted(token, width, size, weight, most = 12) {
  for (; most > 2; most--) {
    const text = label(token, most);
    if (widthOf(text, size, weight) <= width) return text;
  }
  return label(token, 2);
}
const tokenStyle = (token) => (token.special ? { dash: [4, 3] } : {});

function queryChoice(i, rows) {
  const { kind } = state;
  const words =
    kind === "encoder"
      ? `Query ${i + 1} of ${rows.length}: ${named(rows[i])}`
      : `Query ${i + 1} of ${rows.length}: ${queryWords(kind, i)}`;
  return {
    group: "query",
    column: i,
    label: words,
    tip:
      kind === "encoder"
        ? rows[i].shown
        : `has read ${isolate(reads[i].shown)}\nwrites ${isolate(writes[i].shown)}`,
    pressed: i === state.query,
    choose: () => select({ query: i }),
  };
}

function keyChoice(j, columns, weights, hidden) {
  const words = `Key ${j + 1} of ${columns.length}: ${named(columns[j])}, ${hidden ? "masked" : percent(weights[j])}`;
  return {
    group: "key",
    column: j,
    label: words,
    tip: `${isolate(columns[j].shown)}\n${hidden ? "not yet written: masked" : percent(weights[j])}`,
    pressed: j === state.key,
    choose: () => select({ key: j }),
  };
}

function spread(sizes, width) {
  const n = sizes.length,
    slot = Math.min(136, width / n);
  if (Math.max(...sizes) + 10 <= slot)
    return sizes.map((_, i) => width / 2 + (i - (n - 1) / 2) * slot);
  const gap = Math.min(14, (width - total(sizes)) / n);
  let x = (width - total(sizes) - gap * (n - 1)) / 2;
  return sizes.map((size) => {
    const centre = x + size / 2;
    x += size + gap;
    return centre;
  });
}

function spotlight(p) {
  const { kind, layer, head, query, key, temperature } = state,
    [rows, columns] = sides(kind);
  const weights = row(kind, layer, head, query, temperature),
    decoder = kind !== "encoder";
  if (Math.max(rows.length, columns.length) > LINES_UP_TO) return shadedTexts(p, weights);
  const rowSum = "the row adds up to " + sumOf(weights);
  const hidden = (j) => masked(kind, layer, head, query, j);
  const above = (i) => isolate(label(reads[i])) + " →";
  const rowSizes = rows.map((token, i) =>
    Math.max(chipWidth(label(token), 15, 600), decoder ? widthOf(above(i), 12) + 8 : 0),
  );
  const columnSizes = columns.map((token) => chipWidth(label(token), 15));
  const fits = (sizes) => total(sizes) + 7 * sizes.length <= p.width;
  const across = fits(rowSizes) && fits(columnSizes);
  const lines = (from, to) => {
    for (const chosen of [false, true])
      rows.forEach((_, i) => {
        if ((i === query) !== chosen) return;
        const row_i = chosen ? weights : row(kind, layer, head, i, temperature);
        row_i.forEach((w, j) => {
          if (w < (chosen ? 0.004 : 0.06)) return;
          const [x1, y1] = from(i),
            [x2, y2] = to(j),
            m = across
              ? `${x1},${y1 + (y2 - y1) * 0.55} ${x2},${y1 + (y2 - y1) * 0.45}`
              : `${x1 + (x2 - x1) * 0.55},${y1} ${x1 + (x2 - x1) * 0.45},${y2}`;
          p.path(`M${x1},${y1}C${m} ${x2},${y2}`, {
            stroke: chosen ? (j === key ? ink.warm : ink.accent) : ink.faint,
            width: chosen ? 1.2 + 11 * w : 0.8 + 2.4 * w,
            opacity: chosen ? 0.35 + 0.6 * w : 0.1 + 0.22 * w,
          });
        });
      });
  };
  const drawRow = (i, x, y, w, h, text = label(rows[i])) => {
    const on = i === query;
    p.chip(x, y, w, h, text, {
      fill: on ? ink.accent : ink.soft,
      stroke: on ? ink.accent : ink.line,
      ink: on ? ink["accent-ink"] : ink.ink,
      size: 15,
      weight: 600,
      ...tokenStyle(rows[i]),
    });
    p.spot(x, y, w, h, queryChoice(i, rows));
  };
  const drawColumn = (j, x, y, w, h, text = label(columns[j])) => {
    const off = hidden(j),
      colour = visibleShade(weights[j]);
    p.chip(x, y, w, h, text, {
      fill: off ? undefined : rgb(colour),
      stroke: j === key ? ink.warm : ink.line,
      width: j === key ? 2.5 : 1,
      ink: off ? ink.muted : readableOn(colour),
      size: 15,
      ...(off ? { dash: [2, 4] } : tokenStyle(columns[j])),
    });
    p.spot(x, y, w, h, keyChoice(j, columns, weights, off));
  };
  const note = (j) => (hidden(j) ? "masked" : percent(weights[j]));
  const noteLook = (j) => ({
    size: 12,
    weight: j === key ? 700 : 400,
    fill: weights[j] >= 0.005 ? ink.ink : ink.muted,
  });
  if (across) {
    const xs = spread(rowSizes, p.width),
      ks = spread(columnSizes, p.width),
      top = decoder ? 26 : 2,
      bottom = top + 232;
    lines(
      (i) => [xs[i], top + 38],
      (j) => [ks[j], bottom - 2],
    );
    rows.forEach((_, i) => {
      if (decoder)
        p.text(xs[i], 14, above(i), {
          anchor: "middle",
          size: 12,
          fill: i === query ? ink.warm : ink.muted,
          weight: i === query ? 600 : 400,
        });
      drawRow(i, xs[i] - rowSizes[i] / 2, top, rowSizes[i], 36);
    });
    columns.forEach((_, j) => {
      drawColumn(j, ks[j] - columnSizes[j] / 2, bottom, columnSizes[j], 36);
      p.text(ks[j], bottom + 54, columnSizes[j] > 46 || !hidden(j) ? note(j) : "—", {
        anchor: "middle",
        ...noteLook(j),
      });
    });
    p.text(p.width, bottom + 78, rowSum, { anchor: "end", size: 12, fill: ink.muted });
  } else {
    // Where there is no room beside a token, what was read stands above it.
    const stacked = decoder && p.width < 560,
      pitch = stacked ? 56 : 40,
      n = Math.max(rows.length, columns.length),
      span = Math.min(p.width, 860),
      x0 = (p.width - span) / 2;
    const yq = (i) => pitch - 22 + (i + (n - rows.length) / 2) * pitch,
      yk = (j) => pitch - 22 + (j + (n - columns.length) / 2) * pitch;
    const half = x0 + span * 0.42,
      right = x0 + span * 0.6,
      room = span * 0.4 - 54;
    lines(
      (i) => [half, yq(i)],
      (j) => [right, yk(j)],
    );
    rows.forEach((token, i) => {
      const text = fitted(token, span * 0.26, 15, 600),
        w = chipWidth(text, 15, 600);
      drawRow(i, half - w, yq(i) - 16, w, 32, text);
      if (!decoder) return;
      const beside = half - w - 7,
        space = stacked ? span * 0.42 - 20 : half - x0 - w - 26;
      const words = isolate(fitted(reads[i], space, 12)) + " →";
      p.text(stacked ? half : beside, stacked ? yq(i) - 20 : yq(i) + 4, words, {
        anchor: "end",
        size: 12,
        fill: i === query ? ink.warm : ink.muted,
        weight: i === query ? 600 : 400,
      });
    });
    columns.forEach((token, j) => {
      const text = fitted(token, room - 22, 15),
        w = chipWidth(text, 15);
      drawColumn(j, right, yk(j) - 16, w, 32, text);
      p.text(right + w + 9, yk(j) + 4, note(j), noteLook(j));
    });
    p.text(x0 + span, n * pitch + 14, rowSum, { anchor: "end", size: 12, fill: ink.muted });
  }
}
const sumOf = (weights) => total(Array.from(weights)).toFixed(3);

function shadedTexts(p, weights) {
  const { kind, layer, head, query, key } = state,
    [rows, columns] = sides(kind);
  const beside = p.width >= 700,
    w = beside ? (p.width - 44) / 2 : p.width;
  const flow = (list, x0, y0, sizeOf, height, draw) => {
    let x = x0,
      y = y0;
    list.forEach((token, i) => {
      const size = Math.min(sizeOf(token), w);
      if (x + size > x0 + w && x > x0) {
        x = x0;
        y += height;
      }
      draw(i, x, y, size);
      x += size + 5;
    });
    return y + height;
  };
  p.text(0, 13, kind === "encoder" ? "who looks" : "what is being written", {
    size: 12,
    fill: ink.muted,
  });
  const end = flow(
    rows,
    0,
    26,
    (token) => chipWidth(label(token)),
    36,
    (i, x, y, size) => {
      const on = i === query;
      p.chip(x, y, size, 29, label(rows[i]), {
        fill: on ? ink.accent : ink.soft,
        stroke: on ? ink.accent : ink.line,
        ink: on ? ink["accent-ink"] : ink.ink,
        weight: on ? 600 : 400,
        ...tokenStyle(rows[i]),
      });
      p.spot(x, y, size, 29, queryChoice(i, rows));
    },
  );
  const x0 = beside ? w + 44 : 0,
    y0 = beside ? 0 : end + 18;
  p.text(x0, y0 + 13, "what it looks at", { size: 12, fill: ink.muted });
  flow(
    columns,
    x0,
    y0 + 26,
    (token) => chipWidth(label(token)),
    48,
    (j, x, y, size) => {
      const off = masked(kind, layer, head, query, j),
        colour = visibleShade(weights[j]);
      p.chip(x, y, size, 29, label(columns[j]), {
        fill: off ? undefined : rgb(colour),
        stroke: j === key ? ink.warm : ink.line,
        width: j === key ? 2.5 : 1,
        ink: off ? ink.muted : readableOn(colour),
        ...(off ? { dash: [2, 4] } : tokenStyle(columns[j])),
      });
      if (weights[j] >= 0.03 || j === key)
        p.text(x + size / 2, y + 42, off ? "masked" : percent(weights[j]), {
          anchor: "middle",
          size: 11,
          fill: ink.muted,
        });
      p.spot(x, y, size, 29, keyChoice(j, columns, weights, off));
    },
  );
}

function spotlightWords() {
  const { kind, layer, head, query, temperature } = state,
    keys = sides(kind)[1];
  const weights = row(kind, layer, head, query, temperature);
  const best = Array.from(weights.keys())
    .sort((a, b) => weights[b] - weights[a])
    .slice(0, 3)
    .filter((j) => weights[j] >= 0.005);
  const looks = best.map((j) => `${named(keys[j])} ${percent(weights[j])}`).join(", ");
  const who =
    kind === "encoder"
      ? `${named(source[query])} looks at`
      : `Having read ${named(reads[query])}, the decoder writes ${named(writes[query])} and looks at`;
  const where = { cross: "the source", encoder: "the source", decoder: "what was written so far" }[
    kind
  ];
  const warmth = temperature === 1 ? "" : ` Temperature ${temperature.toFixed(2)}.`;
  return `Layer ${number()}, head ${head + 1}. ${who} ${looks} of ${where}. The row adds up to ${sumOf(weights)}.${warmth}`;
}

// View 2: every layer, every head

function headMaps(p) {
  const { kind, temperature } = state,
    {
      shape: [L, H, Q, K],
      data,
    } = array("attention." + kind),
    off = array("off." + kind);
  const left = p.width < 560 ? 30 : 62,
    gap = p.width < 560 ? 5 : 12,
    each = Math.min(220, (p.width - left - 2 - gap * (H - 1)) / H);
  const tall = Math.max(14, Math.min(each * 1.5, (each * Q) / K)),
    below = off ? 30 : 8,
    of = power(temperature),
    T = off && off.shape[2];
  const falls =
    off &&
    Array.from({ length: L * H }, (_, i) =>
      total(Array.from(off.data.subarray(i * T, (i + 1) * T))),
    );
  const most = off ? Math.max(1e-9, ...falls.map(Math.abs)) : 1;
  const lut = Array.from({ length: 256 }, (_, i) => shade(Math.sqrt(i / 255)));
  for (let h = 0; h < H; h++)
    p.text(left + h * (each + gap) + each / 2, 12, (p.width < 560 ? "" : "head ") + (h + 1), {
      size: 12,
      anchor: "middle",
      fill: ink.muted,
    });
  for (let l = 0; l < L; l++) {
    const y = 22 + l * (tall + below + 10);
    p.text(0, y + tall / 2 + 4, (p.width < 560 ? "L" : "layer ") + number(kind, l), {
      size: 12,
      fill: ink.muted,
    });
    for (let h = 0; h < H; h++) {
      const x = left + h * (each + gap),
        on = l === state.layer && h === state.head,
        colours = new Uint8ClampedArray(Q * K * 4);
      for (let q = 0, at = 0, from = (l * H + h) * Q * K; q < Q; q++, from += K) {
        let sum = 0;
        for (let k = 0; k < K; k++) sum += of[data[from + k]];
        for (let k = 0; k < K; k++) {
          const c = lut[Math.min(255, (of[data[from + k]] / sum) * 255) | 0];
          colours[at++] = c[0];
          colours[at++] = c[1];
          colours[at++] = c[2];
          colours[at++] = 255;
        }
      }
      p.map(x, y, each, tall, K, Q, colours);
      p.rect(x - 0.5, y - 0.5, each + 1, tall + 1, {
        stroke: on ? ink.warm : ink.line,
        width: on ? 3 : 1,
        r: 2,
      });
      let words = `Layer ${number(kind, l)}, head ${h + 1}`;
      if (off) {
        const fall = falls[l * H + h],
          size = (Math.abs(fall) / most) * each;
        p.rect(x, y + tall + 6, each, 5, { fill: ink.soft, r: 2.5 });
        if (size > 0.5)
          p.rect(x, y + tall + 6, size, 5, { fill: fall < 0 ? ink.negative : ink.accent, r: 2.5 });
        p.text(
          x + each / 2,
          y + tall + 25,
          signed(fall, each < 44 || Math.abs(fall) >= 10 ? 1 : 2),
          { size: each < 44 ? 10 : 12, anchor: "middle", weight: on ? 700 : 400, fill: ink.ink },
        );
        words += `: without it the output's log-probability ${fall < 0 ? "rises" : "falls"} by ${Math.abs(fall).toFixed(2)} nats`;
      }
      p.spot(x, y, each, tall, {
        group: "heads",
        row: l,
        column: h,
        label: words,
        tip: words,
        pressed: on,
        choose: () => select({ layer: l, head: h }),
      });
    }
  }
}

function headWords() {
  const { kind, layer, head } = state,
    off = array("off." + kind);
  if (!off) return header.missing.heads ? `No switch-off effects: ${header.missing.heads}.` : "";
  const T = off.shape[2],
    first = (layer * off.shape[1] + head) * T,
    falls = Array.from(off.data.subarray(first, first + T));
  const worst = falls.indexOf(Math.max(...falls)),
    parts = array("part." + kind),
    Q = parts.shape[2],
    place = (layer * parts.shape[1] + head) * Q;
  const adds = total(Array.from(parts.data.subarray(place, place + Q))) / Q,
    fall = total(falls);
  return (
    `Layer ${number()}, head ${head + 1} adds a vector of length ${adds.toFixed(2)} on average. Switched off, the whole output's log-probability ${fall < 0 ? "rises" : "falls"} by ${Math.abs(fall).toFixed(2)} nats` +
    (falls[worst] > 0.01 ? `, most at ${named(writes[worst])} (${falls[worst].toFixed(2)}).` : ".")
  );
}

// View 3: query, key, value

function strips(p) {
  const { kind, layer, head, query, key } = state,
    [rows, columns] = sides(kind);
  const { q, scores, weights } = meeting(kind, layer, head, query),
    k = vector("key." + kind, layer, key, head),
    v = vector("value." + kind, layer, key, head);
  const left = p.width < 560 ? 58 : 96,
    E = q.length,
    step = (p.width - left) / E,
    biggest = (list) => Math.max(1e-9, ...list.map(Math.abs));
  const shared = Math.max(biggest(q), biggest(k)),
    product = q.map((x, i) => x * k[i]);
  const strip = (y, name, under, values, most) => {
    p.text(0, y + 20, name, { size: 14, weight: 600 });
    p.text(0, y + 36, under, { size: 11, fill: ink.muted });
    p.line(left, y + 24, p.width, y + 24, { stroke: ink.line });
    values.forEach((x, i) => {
      const h = (Math.abs(x) / most) * 21;
      p.rect(
        left + i * step + step * 0.1,
        x >= 0 ? y + 24 - h : y + 24,
        step * 0.8,
        Math.max(h, 0.6),
        { fill: x >= 0 ? ink.positive : ink.negative, r: step > 7 ? 1.5 : 0 },
      );
    });
    p.field(
      left,
      y,
      p.width - left,
      48,
      E,
      1,
      (_, i) => `${name}, dimension ${i + 1} of ${E}: ${signed(values[i], 4)}`,
      null,
    );
  };
  const fit = (token) => isolate(fitted(token, left - 8, 11));
  strip(0, "query", fit(rows[query]), q, shared);
  strip(56, "key", fit(columns[key]), k, shared);
  strip(112, p.width < 560 ? "q × k" : "query × key", "one by one", product, biggest(product));
  strip(168, "value", fit(columns[key]), v, biggest(v));
  // All keys: where the softmax puts this one.
  const chosen = columns
    .map((_, j) => j)
    .filter((j) => scores[j] > -Infinity)
    .sort((a, b) => scores[b] - scores[a])
    .slice(0, 12);
  if (!chosen.includes(key)) chosen[chosen.length - 1] = key;
  chosen.sort((a, b) => a - b);
  const y0 = 252,
    wide = p.width >= 620,
    xs = [left, left + (wide ? 90 : 62), left + (wide ? 190 : 62)],
    span = p.width - xs[2] - 62;
  p.text(xs[0], y0, "key", { size: 12, fill: ink.muted });
  p.text(xs[1], y0, "score", { size: 12, fill: ink.muted, anchor: wide ? "start" : "middle" });
  p.text(xs[2] + (wide ? 0 : 24), y0, "softmax over all keys", { size: 12, fill: ink.muted });
  chosen.forEach((j, n) => {
    const y = y0 + 20 + n * 24,
      on = j === key,
      x = xs[2] + (wide ? 0 : 24);
    p.text(xs[0], y, isolate(fitted(columns[j], wide ? 76 : 36, 14, on ? 700 : 400)), {
      weight: on ? 700 : 400,
      fill: on ? ink.warm : ink.ink,
    });
    p.text(xs[1] + (wide ? 34 : 18), y, signed(scores[j]), { size: 13, anchor: "end" });
    p.rect(x, y - 11, Math.max(1.5, span * weights[j]), 13, {
      fill: on ? ink.warm : ink.accent,
      r: 3,
    });
    p.text(x + span * weights[j] + 8, y, weights[j].toFixed(4), {
      size: 12,
      fill: ink.muted,
      weight: on ? 700 : 400,
    });
  });
  p.reach(y0 + 20 + chosen.length * 24);
}

function stripWords() {
  const { kind, layer, head, query, key, temperature } = state,
    { q, scores, weights } = meeting(kind, layer, head, query);
  const score = scores[key],
    own = row(kind, layer, head, query, 1)[key],
    columns = sides(kind)[1];
  if (score === -Infinity) return `${named(columns[key])} is masked for this query.`;
  const warm =
    temperature === 1
      ? ""
      : ` At temperature ${temperature.toFixed(2)}: ${row(kind, layer, head, query, temperature)[key].toFixed(4)}.`;
  return `q·k = ${signed(score * Math.sqrt(q.length), 3)}; divided by √${q.length}: ${signed(score, 3)}; softmax over ${count(scores.filter((s) => s > -Infinity).length, "key")}: ${weights[key].toFixed(4)}. The model's own weight: ${own.toFixed(4)}.${warm}`;
}

// View 4: positions

const positionStack = () => stackOf(state.kind);
const pairOf = (i, D, layout) =>
  layout === "halves" ? [i, i + D / 2] : [2 * i, Math.min(2 * i + 1, D - 1)];

function waves(p) {
  const stack = positionStack(),
    {
      shape: [N, D],
      data,
    } = array("positions." + stack),
    scale = array("positions." + stack + ".scale").data;
  const at = (n, d) => data[n * D + d] * scale[n],
    layout = header.positions[stack],
    dims = pairOf(state.pair, D, layout);
  const beside = p.width >= 760,
    w = beside ? p.width * 0.56 : p.width,
    h = 220,
    left = 36,
    here = Math.min(state.query, N - 1);
  let most = 1e-9;
  for (let n = 0; n < N; n++) for (const d of dims) most = Math.max(most, Math.abs(at(n, d)));
  const x = (n) => left + (n * (w - left - 10)) / Math.max(1, N - 1),
    y = (v) => h / 2 + 6 - (v / most) * (h / 2 - 22);
  [most, 0, -most].forEach((v) => {
    p.line(left, y(v), w, y(v), { stroke: ink.line });
    p.text(left - 8, y(v) + 4, signed(v, Math.abs(v) === 1 || !v ? 0 : 2), {
      size: 11,
      anchor: "end",
      fill: ink.muted,
    });
  });
  for (let n = 0; n < N; n += 16)
    p.text(x(n), h + 12, String(n), { size: 11, anchor: "middle", fill: ink.muted });
  p.line(x(here), 4, x(here), h - 4, { stroke: ink.warm, dash: [3, 4] });
  p.text(x(here) + (here > N * 0.8 ? -5 : 5), 12, "position " + here, {
    size: 12,
    fill: ink.warm,
    anchor: here > N * 0.8 ? "end" : "start",
  });
  dims.forEach((d, c) => {
    const colour = c ? ink.negative : ink.accent;
    let path = "";
    for (let n = 0; n < N; n++) path += (n ? "L" : "M") + x(n) + "," + y(at(n, d));
    p.path(path, { stroke: colour, width: 2, dash: c ? [6, 4] : undefined });
    for (let n = 0; n < N; n++)
      if (c) p.rect(x(n) - 2.4, y(at(n, d)) - 2.4, 4.8, 4.8, { fill: colour });
      else p.dot(x(n), y(at(n, d)), 2.8, { fill: colour });
    p.text(
      left + 6 + c * 150,
      h + 30,
      `${c ? "■" : "●"} dimension ${d}: ${signed(at(here, d), 4)}`,
      { size: 12, fill: ink.ink },
    );
  });
  const x0 = beside ? w + 34 : 0,
    y0 = beside ? 8 : h + 52,
    mw = p.width - x0,
    mh = 204;
  let all = 1e-9;
  for (let n = 0; n < N; n++) for (let d = 0; d < D; d++) all = Math.max(all, Math.abs(at(n, d)));
  p.map(
    x0,
    y0,
    mw,
    mh,
    D,
    N,
    cellMap(D, N, (n, d) => mix(at(n, d) / all)),
  );
  p.rect(x0, y0 + (here * mh) / N, mw, Math.max(2, mh / N), { stroke: ink.warm, width: 1.5 });
  p.text(x0, y0 + mh + 17, `${D} dimensions across, ${N} positions down`, {
    size: 12,
    fill: ink.muted,
  });
  p.field(
    x0,
    y0,
    mw,
    mh,
    D,
    N,
    (n, d) => `position ${n}, dimension ${d}: ${signed(at(n, d), 4)}`,
    null,
  );
}
const mix = (v) => {
  const to = v < 0 ? ink.minus : ink.plus,
    u = Math.min(1, Math.abs(v));
  return ink.zero.map((c, i) => c + (to[i] - c) * u);
};

function waveWords() {
  const stack = positionStack(),
    D = array("positions." + stack).shape[1],
    layout = header.positions[stack],
    i = state.pair;
  const length = 2 * Math.PI * 10000 ** ((2 * i) / D),
    how = {
      interleaved: "interleaved, as in the paper: even dimensions are sines, odd ones cosines",
      halves: "in halves, as in Marian: first all sines, then all cosines",
      learned: "learned: no formula, and no pairs; two neighbouring dimensions are drawn",
    }[layout];
  return (
    `The ${stack}'s table. Layout: ${how}.` +
    (layout === "learned"
      ? ""
      : ` This pair turns once in ${length < 100 ? length.toFixed(1) : Math.round(length).toLocaleString("en")} positions.`)
  );
}

// View 5: residual stream, LayerNorm, feed-forward

function streamRows(p) {
  const stack = stackOf(state.kind),
    {
      shape: [R, F, T],
      data,
    } = array("stream." + stack),
    t = Math.min(state.query, T - 1);
  const at = (r, f) => data[(r * F + f) * T + t],
    names = header.sublayers[stack],
    wide = p.width >= 820;
  const before = array("before." + stack),
    after = array("after." + stack),
    bins = before.shape[2],
    range = array("range." + stack).data;
  let most = 1e-9;
  for (let r = 0; r < R; r++) most = Math.max(most, at(r, 0), at(r, 1));
  const height = wide ? 50 : 76,
    head = wide ? 26 : 4;
  const columns = wide
    ? {
        x: 190,
        f: 190 + (p.width - 560) / 2,
        angle: p.width - 350,
        bell: p.width - 274,
        std: p.width,
      }
    : { x: 0, f: p.width * 0.34, angle: p.width * 0.68, bell: p.width * 0.68 + 4, std: p.width };
  const span = (wide ? (p.width - 560) / 2 : p.width * 0.34) - 52;
  if (wide)
    [
      [0, "sub-layer"],
      [columns.x, "length of x"],
      [columns.f, "length of f(x)"],
      [columns.angle, "angle"],
      [columns.bell, "before ▒ and after LayerNorm ─"],
    ].forEach(([x, text]) => p.text(x, 12, text, { size: 12, fill: ink.muted }));
  if (wide) p.text(p.width, 12, "std", { size: 12, fill: ink.muted, anchor: "end" });
  for (let r = 0; r < R; r++) {
    const y = head + r * height,
      n = header.layers[stack][Math.floor(r / names.length)],
      name = names[r % names.length],
      y1 = wide ? y + 16 : y + 40;
    if (r)
      p.line(0, y - 1, p.width, y - 1, { stroke: ink.line, opacity: r % names.length ? 0.4 : 1 });
    p.text(0, wide ? y + 26 : y + 18, `layer ${n} · ${name}`, {
      size: wide ? 14 : 13,
      weight: wide ? 400 : 600,
    });
    for (const [x, f, colour] of [
      [columns.x, 0, ink.faint],
      [columns.f, 1, ink.accent],
    ]) {
      p.rect(x, y1, Math.max(1.5, (span * at(r, f)) / most), 12, { fill: colour, r: 3 });
      p.text(x + (span * at(r, f)) / most + 7, y1 + 11, at(r, f).toFixed(1), {
        size: 12,
        fill: ink.muted,
      });
      if (!wide) p.text(x, y1 + 25, f ? "|f(x)|" : "|x|", { size: 11, fill: ink.muted });
    }
    const degrees = (Math.acos(Math.max(-1, Math.min(1, at(r, 2)))) * 180) / Math.PI;
    if (wide) {
      const a = (degrees * Math.PI) / 180,
        cx = columns.angle + 10,
        cy = y + 30;
      p.line(cx, cy, cx + 15, cy, { stroke: ink.faint, width: 2 });
      p.line(cx, cy, cx + 15 * Math.cos(a), cy - 15 * Math.sin(a), {
        stroke: ink.accent,
        width: 2,
      });
      p.text(columns.angle + 30, y + 27, Math.round(degrees) + "°", { size: 12 });
    }
    const w = wide ? 150 : p.width * 0.32 - 8,
      base = wide ? y + 36 : y + 54,
      x0 = columns.bell,
      end = range[r * T + t].toFixed(1);
    const bell = (counts, filled) => {
      const list = Array.from(counts.data.subarray((r * T + t) * bins, (r * T + t + 1) * bins)),
        top = Math.max(...list);
      let d = "";
      list.forEach((v, i) => {
        d += (i ? "L" : "M") + (x0 + (i * w) / (bins - 1)) + "," + (base - (v / top) * 28);
      });
      p.path(
        filled ? d + `L${x0 + w},${base}L${x0},${base}Z` : d,
        filled ? { fill: ink.before } : { stroke: ink.accent, width: 1.8 },
      );
    };
    bell(before, true);
    bell(after, false);
    p.text(x0, base + 11, "−" + end, { size: 9, fill: ink.muted });
    p.text(x0 + w, base + 11, end, { size: 9, fill: ink.muted, anchor: "end" });
    const std = `${at(r, 4).toFixed(2)} → ${at(r, 6).toFixed(2)}`;
    p.text(p.width, wide ? y + 26 : y + 18, wide ? std : `${Math.round(degrees)}°, std ${std}`, {
      size: 12,
      anchor: "end",
    });
    p.reach(y + height);
  }
}

function streamWords() {
  const stack = stackOf(state.kind),
    token = (stack === "encoder" ? source : reads)[
      Math.min(state.query, (stack === "encoder" ? source : reads).length - 1)
    ];
  return (
    `The stream at ${stack === "encoder" ? "" : "the position that has read "}${named(token)} in the ${stack}. ` +
    (header.norm === "post"
      ? "Post-Norm: y = LayerNorm(x + f(x)) brings the sum back to one scale after every sub-layer."
      : "Pre-Norm: y = x + f(LayerNorm(x)). The stream itself is never brought back to one scale, so it grows.") +
    " std is the biased standard deviation that LayerNorm divides by."
  );
}

function unitsAndPath(p) {
  const stack = stackOf(state.kind),
    beside = p.width >= 760,
    w = beside ? p.width * 0.46 : p.width;
  let y = 0;
  if (array("active." + stack)) {
    const {
        shape: [L, T],
        data,
      } = array("active." + stack),
      t = Math.min(state.query, T - 1),
      ids = array("unit." + stack),
      values = array("strength." + stack),
      n = ids.shape[2];
    p.text(0, 14, `Feed-forward: active of ${header.units[stack]} hidden units`, {
      size: 14,
      weight: 600,
    });
    for (let l = 0; l < L; l++) {
      const y0 = 30 + l * 62,
        share = data[l * T + t],
        bar = w - 108;
      p.text(0, y0 + 13, "layer " + header.layers[stack][l], { size: 13 });
      p.rect(56, y0 + 3, bar, 12, { fill: ink.soft, r: 3 });
      p.rect(56, y0 + 3, Math.max(1.5, bar * share), 12, { fill: ink.accent, r: 3 });
      p.text(56 + bar + 8, y0 + 13, percent(share), { size: 12 });
      const each = bar / n;
      for (let i = 0; i < n; i++) {
        const place = (l * T + t) * n + i,
          v = values.data[place];
        p.text(56 + i * each, y0 + 34, "#" + ids.data[place], { size: 11, fill: ink.muted });
        p.text(56 + i * each, y0 + 48, v.toFixed(2), { size: 11 });
      }
    }
    y = 30 + L * 62;
  }
  if (array("path." + stack))
    pathPlane(p, stack, beside ? w + 40 : 0, beside ? 0 : y + 16, p.width - (beside ? w + 40 : 0));
}

function pathPlane(p, stack, x0, y0, w) {
  const {
      shape: [L, T],
      data,
    } = array("path." + stack),
    t = Math.min(state.query, T - 1),
    h = Math.min(380, w * 0.8),
    list = stack === "encoder" ? source : reads;
  const lo = [Infinity, Infinity],
    hi = [-Infinity, -Infinity];
  for (let i = 0; i < L * T * 2; i++) {
    lo[i % 2] = Math.min(lo[i % 2], data[i]);
    hi[i % 2] = Math.max(hi[i % 2], data[i]);
  }
  const x = (l, i) => x0 + 30 + ((data[(l * T + i) * 2] - lo[0]) / (hi[0] - lo[0] || 1)) * (w - 70),
    y = (l, i) => y0 + 46 + ((data[(l * T + i) * 2 + 1] - lo[1]) / (hi[1] - lo[1] || 1)) * (h - 66);
  const share = header.variance[stack].map((v) => Math.round(v * 100));
  p.text(
    x0,
    y0 + 14,
    w < 420
      ? "Path in two principal directions"
      : "Path through the layers, in two principal directions",
    { size: 14, weight: 600 },
  );
  p.rect(x0, y0 + 26, w, h, { fill: ink.soft, r: 12 });
  const taken = [];
  for (const chosen of [false, true])
    for (let i = 0; i < T; i++) {
      if ((i === t) !== chosen) continue;
      let d = "";
      for (let l = 0; l < L; l++) d += (l ? "L" : "M") + x(l, i) + "," + y(l, i);
      p.path(d, {
        stroke: chosen ? ink.warm : ink.faint,
        width: chosen ? 2.4 : 1,
        opacity: chosen ? 1 : 0.4,
      });
      p.dot(x(L - 1, i), y(L - 1, i), chosen ? 5 : 3, { fill: chosen ? ink.warm : ink.accent });
    }
  // The chosen token's labels first; others where they do not collide.
  const place = (px, py, text, look, left = false) => {
    const tw = widthOf(text, look.size, look.weight),
      box = [px, py - look.size, tw, look.size + 2];
    if (left || px + tw > x0 + w - 4) box[0] = px - tw - 16;
    if (
      taken.some(
        (b) =>
          b[0] < box[0] + box[2] &&
          box[0] < b[0] + b[2] &&
          b[1] < box[1] + box[3] &&
          box[1] < b[1] + b[3],
      )
    )
      return;
    taken.push(box);
    p.text(box[0], py, text, look);
  };
  place(
    x(L - 1, t) + 8,
    y(L - 1, t) + 5,
    isolate(label(list[t])),
    { size: 14, weight: 700, fill: ink.warm },
    L > 1 && x(L - 2, t) > x(L - 1, t),
  );
  for (let l = 0; l < L - 1; l++) {
    p.dot(x(l, t), y(l, t), 3, { fill: ink.card, stroke: ink.warm, width: 1.6 });
    place(x(l, t) + 7, y(l, t) - 5, l ? String(l) : "embedding", { size: 11, fill: ink.warm });
  }
  for (let i = 0; i < T; i++)
    if (i !== t)
      place(x(L - 1, i) + 7, y(L - 1, i) + 4, isolate(label(list[i])), {
        size: 12,
        fill: ink.muted,
      });
  wrapped(
    `These two directions hold ${share[0]} % + ${share[1]} % of the variance; the rest is not drawn.`,
    w,
    12,
  ).forEach((line, n) => p.text(x0, y0 + h + 44 + n * 17, line, { size: 12, fill: ink.muted }));
}

function stream(p) {
  if (array("stream.decoder")) streamRows(p);
  else
    p.text(0, 14, `No lengths and histograms: ${header.missing.stream}.`, {
      size: 13,
      fill: ink.muted,
    });
  const lower = new Picture(p.width);
  unitsAndPath(lower);
  const y = p.height + 28;
  for (const shape of lower.shapes) p.shapes.push(moved(shape, 0, y));
  p.reach(y + lower.height);
}

// View 6: layer by layer

function lens(p) {
  const best = array("lens.id"),
    probable = array("lens.p"),
    ranksOf = array("lens.rank"),
    entropy = array("lens.entropy"),
    written = array("lens.written");
  const [L, T, K] = best.shape,
    t = atPosition(),
    left = p.width < 560 ? 44 : 82,
    each = p.width < 560 ? 54 : Math.max(66, Math.min(118, (p.width - left) / T)),
    perBlock = Math.max(1, Math.floor((p.width - left) / each));
  const shallow = L > 8 ? 30 : 36,
    name = (l) =>
      l === 0 ? (p.width < 560 ? "emb." : "embedding") : (p.width < 560 ? "L" : "layer ") + l;
  let y = 0;
  for (let first = 0; first < T; first += perBlock) {
    const n = Math.min(perBlock, T - first);
    p.text(0, y + 16, "writes", { size: 12, fill: ink.muted });
    for (let c = 0; c < n; c++) {
      const on = first + c === t,
        text = fitted(writes[first + c], each - 6, 14, 700);
      p.text(left + c * each + each / 2, y + 16, text, {
        anchor: "middle",
        size: 14,
        weight: 700,
        fill: on ? ink.warm : ink.ink,
      });
    }
    for (let l = 0; l < L; l++) {
      const y0 = y + 26 + l * (shallow + 3);
      p.text(0, y0 + shallow / 2 + 4, name(l), { size: 12, fill: ink.muted });
      for (let c = 0; c < n; c++) {
        const i = l * T + first + c,
          token = vocabulary.get(best.data[i * K]),
          share = probable.data[i * K],
          colour = shade(share * 0.94),
          right = best.data[i * K] === writes[first + c].id;
        const x = left + c * each;
        p.rect(x, y0, each - 3, shallow, {
          fill: rgb(colour),
          r: 6,
          stroke: first + c === t ? ink.warm : ink.line,
          width: first + c === t ? 1.6 : 1,
        });
        const on = readableOn(colour),
          mark = right ? "✓ " : "",
          look = { anchor: "middle", size: 13, weight: right ? 700 : 400, fill: on },
          room = each - 9 - widthOf(mark, look.size, look.weight);
        p.text(
          x + (each - 3) / 2,
          y0 + shallow / 2 - 1,
          mark + isolate(fitted(token, room, look.size, look.weight)),
          look,
        );
        p.text(x + (each - 3) / 2, y0 + shallow / 2 + 12, Math.round(share * 100) + " %", {
          anchor: "middle",
          size: 10,
          fill: on,
        });
      }
    }
    const rows = L,
      top = y + 26;
    p.field(
      left,
      top,
      n * each,
      rows * (shallow + 3),
      n,
      rows,
      (l, c) => {
        const i = l * T + first + c,
          list = Array.from(
            { length: K },
            (_, k) =>
              `${isolate(vocabulary.get(best.data[i * K + k]).shown)}  ${percent(probable.data[i * K + k])}`,
          ).join("\n");
        return `${name(l)}\n${list}\n${named(writes[first + c])} is number ${ranksOf.data[i]} (${percent(written.data[i])}); entropy ${entropy.data[i].toFixed(2)} bits`;
      },
      (l, c) => select({ kind: state.kind === "encoder" ? "cross" : state.kind, query: first + c }),
    );
    y = top + rows * (shallow + 3) + 20;
  }
  // The chosen token: five best of each layer.
  p.text(0, y + 16, `Five likeliest at ${isolate(label(writes[t]))} in each layer`, {
    size: 14,
    weight: 600,
  });
  const narrow = p.width < 640,
    end = narrow ? 0 : 190,
    span = (p.width - left - end) / K,
    tall = narrow ? 62 : 46;
  if (!narrow) {
    p.text(p.width - 92, y + 16, "rank", { size: 12, fill: ink.muted, anchor: "end" });
    p.text(p.width, y + 16, "entropy", { size: 12, fill: ink.muted, anchor: "end" });
  }
  for (let l = 0; l < L; l++) {
    const y0 = y + 30 + l * tall,
      i = l * T + t;
    p.text(0, y0 + 16, name(l), { size: 12, fill: ink.muted });
    for (let k = 0; k < K; k++) {
      const token = vocabulary.get(best.data[i * K + k]),
        share = probable.data[i * K + k],
        right = token.id === writes[t].id,
        mark = right ? "✓ " : "",
        look = { size: 13, weight: right ? 700 : 400 },
        room = span - 14 - widthOf(mark, look.size, look.weight),
        x = left + k * span;
      p.text(x, y0 + 14, mark + isolate(fitted(token, room, look.size, look.weight)), look);
      p.rect(x, y0 + 20, span - 14, 5, { fill: ink.soft, r: 2.5 });
      p.rect(x, y0 + 20, Math.max(1, (span - 14) * share), 5, {
        fill: right ? ink.accent : ink.faint,
        r: 2.5,
      });
      p.text(x, y0 + 38, percent(share), { size: 11, fill: ink.muted });
    }
    const rank = String(ranksOf.data[i]),
      bits = entropy.data[i].toFixed(2) + " bits";
    if (narrow)
      p.text(left, y0 + 53, `${isolate(label(writes[t], 6))} is number ${rank}; entropy ${bits}`, {
        size: 11,
        fill: ink.muted,
      });
    else {
      p.text(p.width - 92, y0 + 16, rank, { size: 13, anchor: "end" });
      p.text(p.width, y0 + 16, bits, { size: 13, anchor: "end" });
    }
  }
  p.reach(y + 30 + L * tall);
}

function lensWords() {
  const ranksOf = array("lens.rank"),
    written = array("lens.written"),
    [L, T] = ranksOf.shape,
    t = atPosition();
  let since = L - 1;
  while (since > 0 && ranksOf.data[(since - 1) * T + t] === 1) since--;
  const end = (L - 1) * T + t,
    first = since === 0 ? "from the embedding on" : `from layer ${since} on`;
  return ranksOf.data[end] === 1
    ? `${named(writes[t])} comes first ${first}, and is written with probability ${percent(written.data[end])}.`
    : `${named(writes[t])} is number ${ranksOf.data[end]} in the last layer, with probability ${percent(written.data[end])}: the model itself would not have chosen it here.`;
}

// View 7: does attention explain it

function erasing(p) {
  const {
      shape: [T, S],
      data,
    } = array("erase"),
    t = atPosition(),
    layer = crossLayer(),
    head = crossHead(),
    beside = p.width >= 760,
    w = beside ? (p.width - 48) / 2 : p.width;
  const most = Math.max(1e-9, ...data),
    left = 62,
    cell = Math.min(56, (w - left - 18) / S),
    tall = Math.max(3, Math.min(cell, 34)),
    top = 86;
  const weights = Array.from({ length: T }, (_, i) =>
    row("cross", layer, head, i, state.temperature),
  );
  const grid = (x0, y0, title, under, colour, tip) => {
    p.text(x0, y0 + 14, title, { size: 15, weight: 600 });
    p.text(x0, y0 + 32, under, { size: 12, fill: ink.muted });
    source.forEach((token, j) => {
      const size = Math.min(12, Math.max(10, cell)),
        text = isolate(fitted(token, 52, size, 400, 6));
      if (cell >= 11 || j === state.key)
        p.text(x0 + left + j * cell + cell / 2 + 4, y0 + top - 6, text, {
          size,
          turn: -50,
          fill: ink.ink,
        });
    });
    writes.forEach((token, i) => {
      const size = Math.min(12, Math.max(10, tall)),
        weight = i === t ? 700 : 400,
        text = isolate(fitted(token, left - 10, size, weight, 6));
      if (tall >= 10 || i === t)
        p.text(x0 + left - 8, y0 + top + i * tall + tall / 2 + 4, text, {
          size,
          anchor: "end",
          weight,
          fill: i === t ? ink.warm : ink.ink,
        });
    });
    p.map(x0 + left, y0 + top, S * cell, T * tall, S, T, cellMap(S, T, colour));
    p.rect(x0 + left - 0.5, y0 + top - 0.5, S * cell + 1, T * tall + 1, { stroke: ink.line });
    p.rect(x0 + left - 1, y0 + top + t * tall, S * cell + 2, tall, {
      stroke: ink.warm,
      width: 2,
      r: 2,
    });
    p.field(x0 + left, y0 + top, S * cell, T * tall, S, T, tip, (i, j) =>
      select({ kind: "cross", query: i, key: j }),
    );
  };
  grid(
    0,
    0,
    "Attention",
    `layer ${number("cross", layer)}, head ${head + 1}; shade: square root of the weight`,
    (i, j) => visibleShade(weights[i][j]),
    (i, j) => `${named(writes[i])} looks at ${named(source[j])}: ${percent(weights[i][j])}`,
  );
  const x1 = beside ? w + 48 : 0,
    y1 = beside ? 0 : top + T * tall + 34;
  grid(
    x1,
    y1,
    "Without the token",
    "fall of log-probability, measured; −: it rises",
    (i, j) => {
      const v = data[i * S + j];
      return v >= 0 ? visibleShade(v / most) : mix(Math.max(-1, v / most) * 0.9);
    },
    (i, j) =>
      `Without ${named(source[j])} the log-probability of ${named(writes[i])} ${data[i * S + j] < 0 ? "rises" : "falls"} by ${Math.abs(data[i * S + j]).toFixed(3)} nats`,
  );
  if (tall >= 14 && cell >= 22)
    for (let i = 0; i < T; i++)
      for (let j = 0; j < S; j++)
        if (data[i * S + j] < -0.02 * most)
          p.text(x1 + left + j * cell + cell / 2, y1 + top + i * tall + tall / 2 + 4, "−", {
            anchor: "middle",
            size: 12,
          });
  // The chosen output token: both side by side.
  const y2 = y1 + top + T * tall + 40,
    fall = Array.from(data.subarray(t * S, t * S + S)),
    own = Array.from(weights[t]);
  const shown = source
    .map((_, j) => j)
    .sort((a, b) => Math.max(own[b], fall[b] / most) - Math.max(own[a], fall[a] / most))
    .slice(0, 12)
    .sort((a, b) => a - b);
  const name = p.width < 560 ? 60 : 110,
    span = (p.width - name) / 2 - 66;
  p.text(
    0,
    y2,
    `For ${isolate(label(writes[t]))}` +
      (p.width < 560 ? "" : ": the source tokens that matter most by either measure"),
    { size: 14, weight: 600 },
  );
  p.text(name, y2 + 24, "attention weight", { size: 12, fill: ink.muted });
  p.text(
    name + span + 66,
    y2 + 24,
    p.width < 560 ? "fall without it" : "fall of log-probability without it (nats)",
    { size: 12, fill: ink.muted },
  );
  const high = Math.max(1e-9, ...fall.map(Math.abs)),
    digits = high < 0.05 ? 4 : 2;
  shown.forEach((j, n) => {
    const y = y2 + 48 + n * 25,
      x = name + span + 66;
    const weight = j === state.key && state.kind === "cross" ? 700 : 400;
    p.text(0, y, isolate(fitted(source[j], name - 8, 14, weight)), { weight });
    p.rect(name, y - 11, Math.max(1.5, span * own[j]), 13, { fill: ink.accent, r: 3 });
    p.text(name + span * own[j] + 7, y, percent(own[j]), { size: 12, fill: ink.muted });
    p.rect(x, y - 11, Math.max(1.5, (span * Math.abs(fall[j])) / high), 13, {
      fill: fall[j] < 0 ? undefined : ink.warm,
      stroke: fall[j] < 0 ? ink.warm : undefined,
      dash: fall[j] < 0 ? [3, 2] : undefined,
      r: 3,
    });
    p.text(x + (span * Math.abs(fall[j])) / high + 7, y, signed(fall[j], digits), {
      size: 12,
      fill: ink.muted,
    });
  });
  p.reach(y2 + 48 + shown.length * 25);
}

/* Rank correlation of attention and erase test, a row at a time, and their mean over rows.
   No temperature changes the order of weights, so none changes this. */
const agreements = new Map();
function agreement(layer, head) {
  const place = layer * headsOf("cross") + head;
  if (!agreements.has(place)) {
    const {
        shape: [T, S],
        data,
      } = array("erase"),
      rows = [];
    for (let i = 0; i < T; i++)
      rows.push(rankCorrelation(row("cross", layer, head, i, 1), data.subarray(i * S, i * S + S)));
    const real = rows.filter((v) => v !== null);
    agreements.set(place, { rows, mean: real.length ? total(real) / real.length : null });
  }
  return agreements.get(place);
}

function eraseWords() {
  const layer = crossLayer(),
    head = crossHead(),
    { rows, mean } = agreement(layer, head),
    t = atPosition(),
    say = (v) => (v === null ? "not defined" : signed(v));
  let best = [-2, 0, 0];
  for (let l = 0; l < layersOf("cross").length; l++)
    for (let h = 0; h < headsOf("cross"); h++) {
      const m = agreement(l, h).mean;
      if (m !== null && m > best[0]) best = [m, l, h];
    }
  return (
    `Rank correlation at ${named(writes[t])}: ${say(rows[t])}; mean over the output: ${say(mean)} (1: the same order, 0: none). ` +
    (best[0] > -2
      ? `Of all heads, layer ${number("cross", best[1])}, head ${best[2] + 1} agrees best: ${say(best[0])}.`
      : "")
  );
}
