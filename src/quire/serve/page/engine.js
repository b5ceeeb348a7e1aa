// The engine at work, drawn from `feed`: nothing here asks the server for anything.

const PARTS = {
  prepare: ["time", "tokenized, and on the way to the engine"],
  unseen: ["ahead", "not measured: no viewer was connected"],
  grammar: ["drafted", "its grammar was being compiled"],
  queue: ["cached", "waited to run for the first time"],
  prompt: ["prompt", "its prompt was computed"],
  decode: ["drawn", "its tokens were sampled"],
  masks: ["drafted", "waited for what a grammar allows"],
  others: ["others", "waited for the work of other requests"],
  preempted: ["bad", "preempted: its pages were taken back"],
  restart: ["bad", "its engine was lost"],
  deliver: ["time", "on the way back, as text"],
};
const CELLS = { "-": "kept", o: "drawn", O: "shared", x: "others", X: "others" };
const LEGENDS = {
  steps: { prompt: "prompt", drawn: "generation", drafted: "drafts, masks", time: "time", bad: "preempted" },
  requests: { cached: "cached prompt", prompt: "computed prompt", ahead: "prompt to compute", drawn: "generated" },
  pool: { drawn: "in use", shared: "shared", kept: "cached", others: "other keys", ahead: "free" },
};
const TILES = {
  generated: "tokens/s generated", prompt: "prompt tokens/s", running: "running", waiting: "waiting", pages: "of the KV cache in use",
  hits: "of prompt tokens cached", preemptions: "preemptions", restarts: "restarts",
};
const TIERS = {
  host: "of host memory in use", fetched: "of prompt tokens not on the device fetched", moved: "stored and fetched",
  disk: "pages on disk", lost: "pages lost in tiers",
};
const MOST_ROWS = 40;
const BETWEEN = 60; // milliseconds between two pictures

const view = { shown: false, stale: true, last: 0, tab: "active", rows: new Map(), chosen: null, pointed: null, colours: {}, tiles: {} };

/** What the page's own HTML leaves out because it follows from tables. */
function dressEngine() {
  for (const [name, label] of Object.entries(TILES))
    ui.tiles.append(el("div", {}, (view.tiles[name] = el("b", {}, "–")), el("span", {}, label)));
  ui.tiles.firstChild.append(el("canvas", { id: "spark", ariaHidden: true }));
  for (const [name, parts] of Object.entries(LEGENDS))
    byId(`${name}Legend`).append(...Object.entries(parts).map(([colour, label]) => el("span", {}, swatch(colour), label)));
}

function drawEngine() {
  requestAnimationFrame(drawEngine);
  const now = performance.now();
  if (document.hidden || !(view.stale || view.flash > now) || now - view.last < BETWEEN) return;
  view.last = now;
  view.stale = false;
  showPulse();
  if (!view.shown || !feed.hello) return;
  drawTiles();
  drawSteps();
  drawPool(now);
  drawRequests();
  drawHistogram("ttft");
  drawHistogram("itl");
  drawActivity();
  if (view.chosen !== null) drawRequest();
}

/** A colour of the style sheet, as a canvas wants it. */
function paint(name) {
  const { dark } = document.documentElement.dataset;
  if (view.dark !== dark) Object.assign(view, { dark, colours: {} });
  if (!view.colours[name]) {
    ui.probe.style.color = `var(--${name})`;
    view.colours[name] = getComputedStyle(ui.probe).color;
  }
  return view.colours[name];
}

/** A canvas as large as its box, in device pixels; what is drawn is measured in the box's own. */
function board(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = Math.min(devicePixelRatio || 1, 2);
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) Object.assign(canvas, { width: across, height: down });
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const fill = (colour, ...box) => {
    pen.fillStyle = paint(colour);
    pen.fillRect(...box);
  };
  return { pen, fill, width, height };
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** What the tiles of host memory and disk show; they appear when there are such tiers. */
function toldTiers(tiers, percent) {
  if (!view.tiles.host)
    for (const [name, label] of Object.entries(TIERS))
      ui.tiles.append(el("div", {}, (view.tiles[name] = el("b", {}, "–")), el("span", {}, label)));
  const bytes = tiers.rates.stored + tiers.rates.fetched + tiers.rates.written + tiers.rates.read;
  return {
    host: percent(tiers.used, tiers.pages), fetched: percent(tiers.hits, tiers.queries), moved: `${rate(bytes / 1e6)} MB/s`,
    disk: count(tiers.on_disk), lost: count(tiers.failures),
  };
}

function drawTiles() {
  const { hello, stats, queue, engine, pool, rates } = feed;
  const [, prompt, generated] = latestRates();
  const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
  const told = {
    generated: rate(generated), prompt: rate(prompt), running: `${count(queue.running)} / ${count(hello.max_seqs * hello.engines)}`, waiting: count(queue.waiting),
    pages: hello.pages > hello.engines ? percent(pool.used, hello.pages) : "none", hits: percent(stats.cached_tokens, stats.prompt_tokens),
    preemptions: count(stats.preemptions), restarts: count(engine.restarts),
  };
  if (stats.tiers) Object.assign(told, toldTiers(stats.tiers, percent));
  for (const [name, text] of Object.entries(told)) setText(view.tiles[name], text);
  ui.engineIdle.hidden = queue.running + queue.waiting > 0;
  setText(ui.engineAbout, `${hello.model} · ${hello.device}, ${hello.dtype} · context ${count(hello.max_model_len)} · Quire ${hello.server}`);
  const { pen, width, height } = board(byId("spark"));
  const most = Math.max(1, ...rates.map((one) => one[2]));
  pen.beginPath();
  for (const [t, , drawn] of rates) pen.lineTo(width - (clock() - t) * 2, height - 2 - ((height - 4) * drawn) / most);
  pen.strokeStyle = paint("drawn");
  pen.lineWidth = 1.5;
  pen.stroke();
}

// ---- steps

const STEP_WIDTH = 5;

function drawSteps() {
  const { pen, fill, width, height } = board(ui.steps);
  const shown = feed.steps.slice(-Math.floor(width / STEP_WIDTH));
  const most = Math.max(8, ...shown.map((step) => step.tokens));
  const slowest = Math.max(1, ...shown.map((step) => step.ms));
  const floor = height * 0.72;
  const left = width - shown.length * STEP_WIDTH;
  shown.forEach((step, i) => {
    const column = (colour, y, tall) => fill(colour, left + i * STEP_WIDTH, y, STEP_WIDTH - 1, tall);
    const tall = Math.sqrt(step.tokens / most) * (floor - 14); // small steps stay visible beside large ones
    let y = floor;
    for (const [colour, tokens] of [["prompt", step.prompt], ["drafted", step.drafted], ["drawn", step.tokens - step.prompt - step.drafted]]) {
      const share = (tall * tokens) / (step.tokens || 1);
      column(colour, (y -= share), share);
    }
    if (step.preempted) column("bad", y - 5, 3);
    const time = Math.max(1, ((height - floor - 8) * step.ms) / slowest);
    column("time", floor + 6, time);
    column("drafted", floor + 6, time * Math.min(1, step.mask_ms / (step.ms || 1)));
  });
  pen.fillStyle = paint("faint");
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(`${count(most)} tokens`, 2, 11);
  pen.fillText(duration(slowest / 1000), 2, height - 2);
  const at = Math.min(shown.length - 1, view.pointed === null ? Infinity : Math.floor((view.pointed - left) / STEP_WIDTH));
  if (view.pointed !== null && shown[at]) {
    pen.strokeStyle = paint("ink");
    pen.strokeRect(left + at * STEP_WIDTH - 0.5, 0.5, STEP_WIDTH, height - 1);
  }
  setText(ui.stepsText, shown[at] ? describeStep(shown[at]) : "No step yet.");
}

function describeStep(step) {
  const said = [`${feed.hello.engines > 1 ? `engine ${step.engine} · ` : ""}step ${step.step}`, `${step.rows} rows`, `${step.tokens} tokens`];
  if (step.prompt) said.push(`${step.prompt} of prompts`);
  if (step.drafted) said.push(`${step.accepted} of ${step.drafted} drafts right`);
  said.push(`${step.drawn} sampled`);
  if (step.masked) said.push(`${step.masked} under a grammar`);
  if (step.given) said.push(`${step.given} given by it`);
  if (step.preempted) said.push(`${step.preempted} preempted`);
  said.push(duration(step.ms / 1000));
  if (step.mask_ms) said.push(`masks ${duration(step.mask_ms / 1000)}`);
  return said.join(" · ");
}

// ---- pages

function drawPool(now) {
  const { pen, fill, width, height } = board(ui.pool);
  const cells = feed.map.length;
  let side = Math.min(22, Math.sqrt((width * height) / cells));
  while (Math.floor(width / side) * Math.floor(height / side) < cells) side *= 0.98;
  const across = Math.floor(width / side);
  const full = side - Math.min(1, side / 6);
  view.flash = 0;
  feed.map.forEach((cell, i) => {
    const box = [(i % across) * side, Math.floor(i / across) * side, full, full];
    fill(CELLS[cell] || "ahead", ...box);
    const age = now - (feed.changed[i] ?? -Infinity);
    if (age > 500 || view.still) return;
    pen.globalAlpha = 1 - age / 500;
    fill("sheet", ...box);
    pen.globalAlpha = 1;
    view.flash = now + 500;
  });
  const { used, cached, blank } = feed.pool;
  const { pages, page_size: size, pages_per_cell: each } = feed.hello;
  setText(ui.poolText, `${count(used)} in use, ${count(cached)} cached, ${count(blank)} free of ${count(pages)} pages of ${size} tokens${each > 1 ? `; every ${each}th is shown` : ""}`);
}

// ---- requests

function drawRequests() {
  const all = [...feed.requests.values()];
  const over = all.filter((request) => request.state === "finished").reverse();
  const active = all.filter((request) => request.state !== "finished").sort((a, b) => a.arrived - b.arrived);
  setText(ui.tabActive, `Active ${active.length}`);
  setText(ui.tabFinished, `Finished ${over.length}`);
  const chosen = view.tab === "active" ? active : over;
  const listed = chosen.slice(0, MOST_ROWS);
  const scale = Math.max(64, ...listed.map((request) => request.prompt + request.drawn));
  const keys = new Set(listed.map((request) => request.key));
  for (const [key, row] of view.rows) {
    if (keys.has(key)) continue;
    row.node.remove();
    view.rows.delete(key);
  }
  listed.forEach((request, i) => {
    const row = view.rows.get(request.key) || makeRow(request);
    updateRow(row, request, scale);
    if (ui.requests.children[i] !== row.node) ui.requests.insertBefore(row.node, ui.requests.children[i] || null);
  });
  const more = chosen.length - listed.length;
  setText(ui.requestsText, listed.length ? (more ? `and ${more} more` : "") : view.tab === "active" ? "Nothing runs and nothing waits." : "Nothing has finished yet.");
}

function makeRow({ key, id, choice }) {
  const bars = ["cached", "prompt", "ahead", "drawn"].map((name) => swatch(name, "span"));
  const name = el("code", {}, id.replace(/^[a-z]+-/, "").slice(0, 8) + (choice ? `·${choice}` : ""));
  const [state, tokens, age] = ["state", "tokens", "age"].map((className) => el("span", { className }));
  const node = el("li", {}, el("button", { onclick: () => chooseRequest(key) }, name, state, el("span", { className: "bar" }, ...bars), tokens, age));
  const row = { node, bars, state, tokens, age };
  view.rows.set(key, row);
  return row;
}

function updateRow(row, request, scale) {
  const { prompt, drawn, state } = request;
  const cached = Math.min(request.cached, prompt);
  const computed = drawn || state === "finished" ? prompt : Math.min(prompt, Math.max(cached, request.computed ?? 0));
  [cached, computed - cached, prompt - computed, drawn].forEach((tokens, i) => (row.bars[i].style.width = `${(100 * tokens) / scale}%`));
  setText(row.state, state === "finished" ? request.reason : state);
  row.state.dataset.state = state;
  setText(row.tokens, `${count(prompt)} + ${count(drawn)}`);
  setText(row.age, duration(request.wall ?? Math.max(0, clock() - request.arrived)));
}

function chooseRequest(key) {
  view.chosen = key;
  drawRequest();
  if (!ui.requestDialog.open) ui.requestDialog.showModal();
}

/** By the id an answer has: the link below it leads here. The server may tell of its end a moment later than the answer did. */
function chooseAnswer(id, until = performance.now() + 3000) {
  const found = [...feed.requests.values()].find((request) => request.id === id);
  if (found) chooseRequest(found.key);
  else if (performance.now() < until) setTimeout(() => chooseAnswer(id, until), 100);
  else announce("The server no longer lists this request");
}

function drawRequest() {
  const request = feed.requests.get(view.chosen);
  if (!request) return;
  const { state, parts } = request;
  const over = state === "finished";
  const wall = request.wall ?? Math.max(0, clock() - request.arrived);
  const rows = feed.hello.parts.filter((name) => parts[name] > 0).map((name) => [name, parts[name], ...(PARTS[name] || ["time", ""])]);
  if (!over) rows.push(["now", Math.max(0, wall - rows.reduce((sum, row) => sum + row[1], 0)), "ahead", `${state}, under way`]);
  setText(byId("requestDialogTitle"), request.id);
  const facts = {
    state: over ? `finished: ${request.reason}` : state,
    engine: feed.hello.engines > 1 && String(request.engine),
    adapter: request.adapter,
    prompt: `${request.prompt} tokens, ${request.cached} cached`,
    generated: `${request.drawn} of at most ${request.max_tokens ?? "any number of"} tokens`,
    "first token": over && request.ttft !== null && `after ${duration(request.ttft)}`,
    drafts: request.drafted && `${request.accepted} of ${request.drafted} right`,
    preempted: request.preemptions && `${request.preemptions} ×`,
    grammar: request.grammar && "structured output",
  };
  ui.requestFacts.replaceChildren(...Object.entries(facts).filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
  ui.requestBar.replaceChildren(...rows.map(([name, seconds, colour]) => {
    const part = swatch(colour, "span");
    part.title = `${name}: ${duration(seconds)}`;
    part.style.flexGrow = seconds / wall;
    return part;
  }));
  const line = ([name, seconds, colour, why]) => el("tr", {}, el("th", { scope: "row" }, swatch(colour), name),
    ...[duration(seconds), `${((100 * seconds) / wall || 0).toFixed(1)} %`, why].map((text) => el("td", {}, text)));
  ui.requestParts.replaceChildren(...[...rows, ["wall", wall, "sheet", over ? "from arrival to end" : "so far"]].map(line));
}

// ---- distributions, and what else happened

function drawHistogram(name) {
  const [counts, bounds, box] = [feed.stats[name], feed.hello[`${name}_bounds`], byId(`${name}Bars`)];
  const total = counts.reduce((sum, n) => sum + n, 0);
  const first = Math.max(0, counts.findIndex((n) => n > 0) - 1);
  const shown = total ? counts.slice(first, counts.findLastIndex((n) => n > 0) + 2) : [];
  const most = Math.max(...shown);
  if (box.children.length !== shown.length) box.replaceChildren(...shown.map(() => el("div", {}, el("i"), el("small"))));
  shown.forEach((n, i) => {
    const bound = bounds[first + i];
    const [bar, label] = box.children[i].children;
    bar.style.height = `${(100 * n) / most}%`;
    box.children[i].title = `${n} up to ${duration(bound ?? Infinity)}`;
    setText(label, bound ? duration(bound) : "more");
  });
  const said = [50, 90, 99].map((p) => `p${p} ${quantile(counts, bounds, (p / 100) * total)}`).join(" · ");
  setText(byId(`${name}Text`), total ? `${said} · ${count(total)} in all` : "Nothing measured yet.");
}

/** Where the n-th of all would be, if the values of a bucket were spread evenly. */
function quantile(counts, bounds, n) {
  const at = counts.findIndex((inside) => (n -= inside) <= 0);
  if (at >= bounds.length) return `> ${duration(bounds.at(-1))}`;
  const low = bounds[at - 1] ?? 0;
  return duration(low + ((bounds[at] - low) * (n + counts[at])) / counts[at]);
}

function drawActivity() {
  const { stats, engine, log } = feed;
  const list = (counts) => Object.entries(counts).map(([name, n]) => `${name} ${count(n)}`).join(", ") || "none";
  const used = {}; // adapters, by the requests that are shown
  for (const { adapter: it } of feed.requests.values()) if (it) used[it] = (used[it] || 0) + 1;
  const facts = {
    "tokens generated": count(stats.generated_tokens),
    "prompt tokens": `${count(stats.prompt_tokens)}, ${count(stats.cached_tokens)} cached`,
    finished: list(stats.finished),
    "tool calls": list(stats.tool_calls),
    adapters: list(used),
    grammars: `${stats.compiling} being compiled, ${stats.grammar_losses} processes lost`,
    engine: `${feed.engines.map(({ state, pid }) => `${state}${pid ? `, process ${pid}` : ""}`).join(" · ")}; ${engine.restarts} restarts, ${engine.replayed} requests went on`,
    viewers: count(stats.viewers),
  };
  if (!ui.activity.firstChild) ui.activity.append(...Object.keys(facts).flatMap((name) => [el("dt", {}, name), el("dd")]));
  Object.values(facts).forEach((text, i) => setText(ui.activity.children[2 * i + 1], text));
  if (ui.log.dataset.said === String(log.said)) return;
  ui.log.dataset.said = log.said;
  ui.log.replaceChildren(...log.lines.map(([when, text]) => el("li", {}, el("time", {}, when), text)));
}
