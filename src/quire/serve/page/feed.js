// The server's events (docs/events.md), kept as the page needs them. While the page is seen it is one viewer, in both views:
// an answer's times are measured only while somebody watches.

const MOST_STEPS = 1000;
const MOST_FINISHED = 400;
const SILENCE = 25000; // milliseconds; the server says something every ten seconds
const UNSEEN = 60000; // milliseconds in the background after which the stream is given up
const RETRY = [300, 1000, 2000, 4000]; // milliseconds

const feed = {
  state: "connecting", // loading, live, lost, full, off
  hello: null,
  engine: null, // all of them together
  engines: [], // as they told, by number
  stats: null,
  pool: null,
  queue: { running: 0, waiting: 0 }, // everybody's
  requests: new Map(), // by key
  steps: [], // with the columns by name
  rates: [], // [t, prompt, generated]
  map: [], // one character per cell
  changed: [], // when each cell became another one
  log: { said: 0, lines: [] }, // [time of day, text], the latest first
  lead: 0, // the server's clock less this page's
};

const clock = () => performance.now() / 1000 + feed.lead;
const latestRates = () => (feed.rates.length && clock() - feed.rates.at(-1)[0] < 2.5 ? feed.rates.at(-1) : [0, 0, 0]);

const TAKE = {
  hello(event) {
    Object.assign(feed, { hello: event, lead: event.t - performance.now() / 1000, steps: [], rates: [], map: [], changed: [], engines: [] });
  },
  snapshot(event) {
    feed.requests.clear();
    for (const one of [event, ...event.others]) TAKE.engine(one.engine);
    TAKE.requests(event);
    TAKE.pages(event.pages);
    TAKE.stats(event.stats);
    for (const { step } of [event, ...event.others]) if (step) TAKE.step(step);
    showState("live");
  },
  requests(event) {
    for (const told of event.requests) {
      const known = feed.requests.get(told.key);
      if (told.state === "finished") feed.requests.delete(told.key); // the latest to finish is the last in the map
      feed.requests.set(told.key, { ...known, ...told });
    }
    for (const { key, state } of feed.requests.values()) {
      if (feed.requests.size <= MOST_FINISHED) break;
      if (state === "finished") feed.requests.delete(key);
    }
  },
  step(event) {
    const { step_columns: columns } = feed.hello;
    feed.steps.push(...event.steps.map((numbers) => ({ engine: event.engine, ...Object.fromEntries(columns.map((name, i) => [name, numbers[i]])) })));
    feed.steps.splice(0, feed.steps.length - MOST_STEPS);
    feed.queue = event;
    event.keys.forEach((key, i) => {
      const request = feed.requests.get(key);
      for (const name of ["row", "computed", "drawn", "drafted", "accepted"]) if (request && event[name]) request[name] = event[name][i];
    });
  },
  pages(event) {
    feed.pool = event;
    [...event.cells].forEach((cell, i) => {
      const at = event.first + i;
      if (feed.map[at] && feed.map[at] !== cell) feed.changed[at] = performance.now();
      feed.map[at] = cell;
    });
  },
  stats(event) {
    feed.stats = feed.queue = event;
    feed.rates.push([event.t, event.rates.prompt, event.rates.generated]);
    feed.rates.splice(0, feed.rates.length - 120);
  },
  engine(event) {
    const before = feed.engines[event.engine]?.state;
    feed.engines[event.engine] = event;
    const all = feed.engines.filter(Boolean);
    const sum = (name) => all.reduce((total, one) => total + one[name], 0);
    feed.engine = { ...(all.find(({ state }) => state === "ready") || event), restarts: sum("restarts"), replayed: sum("replayed") };
    const who = feed.hello.engines > 1 ? `Engine ${event.engine}` : "The engine";
    if (event.state !== "ready") note(`${who} is ${event.state}${event.reason ? `: ${event.reason}` : ""}`);
    else if (before && before !== "ready") note(`${who} is ready again; ${event.replayed} requests went on so far`);
  },
  gap: (event) => note(`This page was too slow: ${event.lost} events are not shown`),
  bye: (event) => note(event.reason),
};

function note(text) {
  feed.log.said += 1;
  feed.log.lines.unshift([new Date().toLocaleTimeString(), text]);
  feed.log.lines.length = Math.min(feed.log.lines.length, 50);
}

/** For as long as the page is there: again whenever the stream ends, as when the server is started again. */
async function follow() {
  for (let tries = 0; ; tries += 1) {
    if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    try {
      await readModels();
      await followOnce(() => (tries = 0));
      showState("lost");
    } catch (error) {
      showState(error.status === 404 ? "off" : error.status !== 503 ? "lost" : /load/.test(error.message) ? "loading" : "full");
      if (error.status === 404) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY[Math.min(tries, RETRY.length - 1)]));
  }
}

async function followOnce(begun) {
  const abort = new AbortController();
  let heard = performance.now();
  let seen = heard;
  const watch = setInterval(() => {
    if (!document.hidden) seen = performance.now();
    if (performance.now() - heard > SILENCE || performance.now() - seen > UNSEEN) abort.abort();
  }, 1000);
  try {
    const response = await call("/engine/events", { signal: abort.signal });
    begun();
    for await (const { name, data } of readEvents(response, () => (heard = performance.now()))) {
      TAKE[name]?.(JSON.parse(data));
      view.stale = true;
    }
  } finally {
    clearInterval(watch);
  }
}

async function readModels() {
  const { data } = await (await call("/v1/models")).json();
  const chosen = ui.model.value || kept.get("model");
  const names = data.map(({ id }) => id);
  server.length = data[0].max_model_len;
  server.sees = Boolean(data[0].input_modalities?.includes("image"));
  ui.picture.hidden = !server.sees;
  ui.model.replaceChildren(...names.map((id) => el("option", { value: id }, id)));
  ui.model.value = names.includes(chosen) ? chosen : names[0];
  ui.model.disabled = names.length < 2;
  const tasks = data[0].supported_tasks;
  const pools = !tasks.includes("generate");
  ui.composer.hidden = ui.suggestions.hidden = pools;
  if (pools) ui.welcome.firstElementChild.textContent = "This model does not chat";
  const does = `returns vectors or scores (${tasks.join(", ")}). Requests to its API appear under Engine.`;
  ui.welcomeModel.textContent = pools ? `${ui.model.value} ${does}` : `${ui.model.value} is ready when you are.`;
  showComposer();
}

const STATES = {
  connecting: "connecting", loading: "the model is loading", lost: "no connection", full: "too many viewers", off: "no events",
};

/** Tokens per second: generated, or of prompts if the model generates nothing. */
const speed = () => latestRates()[feed.hello?.tasks?.includes("generate") === false ? 1 : 2];

function showState(state) {
  feed.state = state;
  showPulse();
}

function showPulse() {
  const { running, waiting } = feed.queue;
  const well = feed.engine?.state === "ready";
  const work = running + waiting ? `${running} running${waiting ? `, ${waiting} waiting` : ""} · ${rate(speed())} tokens/s` : "idle";
  setText(ui.pulseText, STATES[feed.state] || (well ? work : `engine ${feed.engine.state}`));
  ui.pulse.dataset.state = feed.state !== "live" ? feed.state : !well ? "lost" : running ? "working" : "live";
}
