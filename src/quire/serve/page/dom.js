// What every other part uses: elements, what the browser keeps, calls to the server, and its streams.
// Text only ever becomes text nodes. Nothing in these files parses HTML, and the page's policy (Trusted Types) forbids it.

const BASE = location.pathname.replace(/(\/(docs|redoc))?\/*$/, ""); // the server's root, wherever a proxy shows it
const byId = (id) => document.getElementById(id);
const ui = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));

/** The value of a JSON text; undefined if it is none. */
function parsed(json) {
  try {
    return JSON.parse(json);
  } catch {
    return undefined;
  }
}

function el(tag, props, ...children) {
  const node = document.createElement(tag);
  if (tag === "button") node.type = "button";
  for (const [name, value] of Object.entries(props || {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

function svg(tag, props, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const ICONS = {
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  auto: "M12 4a8 8 0 1 0 0 16zm0 0a8 8 0 0 1 0 16",
  check: "m5 12 5 5 9-10",
  close: "m6 6 12 12M18 6 6 18",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  dark: "M19 14A8 8 0 0 1 10 5a8 8 0 1 0 9 9z",
  edit: "m4 20 4-1L19 8l-3-3L5 16zM14 7l3 3",
  export: "M12 15V4M8 8l4-4 4 4M5 13v7h14v-7",
  help: "M9 9a3 3 0 1 1 4 3l-1 2m0 3v.5",
  left: "m14 6-6 6 6 6",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 3v2m0 14v2M3 12h2m14 0h2M5.6 5.6 7 7m10 10 1.4 1.4m0-12.8L17 7M7 17l-1.4 1.4",
  logo: "m3 4.5 9 4.5 9-4.5M3 9.5l9 4.5 9-4.5M3 14.5 12 19l9-4.5",
  menu: "M4 7h16M4 12h16M4 17h10",
  picture: "M4 5h16v14H4zm0 11 5-5 4 4 3-3 4 4M15 8.5v.5",
  plus: "M12 5v14M5 12h14",
  right: "m10 6 6 6-6 6",
  send: "M12 19V5m-6 6 6-6 6 6",
  settings: "M4 8h9m4 0h3M4 16h3m4 0h9M15 6v4m-6 4v4",
  stop: "M8 8h8v8H8zm2 2h4v4h-4z",
  tool: "m8 7-5 5 5 5m8-10 5 5-5 5M13 5l-2 14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};
const icon = (name) => svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
const iconButton = (name, label, onclick) => el("button", { className: "quiet", title: label, "aria-label": label, onclick }, icon(name));

/** Buttons and headings that the page's own HTML only names. */
function dress() {
  for (const node of document.querySelectorAll("[data-icon]")) {
    node.prepend(icon(node.dataset.icon));
    if (node.title) node.setAttribute("aria-label", node.title);
  }
  for (const dialog of document.querySelectorAll("dialog")) {
    const title = el("h2", { id: `${dialog.id}Title` }, dialog.title);
    const asks = dialog.id === "keyDialog"; // it goes when there is an answer
    dialog.setAttribute("aria-labelledby", title.id);
    dialog.removeAttribute("title");
    dialog.prepend(el("header", {}, title, !asks && iconButton("close", "Close", () => dialog.close())));
    dialog.addEventListener(asks ? "cancel" : "click", (event) => {
      if (asks) event.preventDefault();
      else if (event.target === dialog) dialog.close();
    });
  }
}

function swatch(colour, tag = "i") {
  const node = el(tag);
  node.style.background = `var(--${colour})`;
  return node;
}

function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    const copied = await copyText(text());
    button.replaceChildren(icon(copied ? "check" : "close"));
    announce(copied ? "Copied" : "Not copied: the browser forbids it", copied);
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // a page that came over plain HTTP from another machine has no clipboard: the old way
    const field = el("textarea", { value: text, className: "offscreen" });
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}

/** Says something to screen readers, and shows it for a moment. */
function announce(text, quietly) {
  ui.toast.textContent = text;
  ui.toast.classList.toggle("shown", !quietly);
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => ui.toast.classList.remove("shown"), 2500);
}

// ---- what the browser keeps

/** Where a browser keeps nothing: in memory, as long as the page is there. */
function storage(name) {
  try {
    return window[name].valueOf();
  } catch {
    return Object.create({
      getItem(key) { return this[key] ?? null; },
      setItem(key, value) { this[key] = value; },
      removeItem(key) { delete this[key]; },
    });
  }
}

const local = storage("localStorage");
const session = storage("sessionStorage");
const ownKey = () => session.getItem("quire.key");

const kept = {
  get(name, otherwise) {
    try {
      return JSON.parse(local.getItem(`quire.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      local.setItem(`quire.${name}`, JSON.stringify(value));
    } catch {
      announce("This browser has no room left: the conversation is not kept");
    }
  },
  drop: (name) => local.removeItem(`quire.${name}`),
  names: (prefix) =>
    Object.keys(local).filter((name) => name.startsWith(`quire.${prefix}`)).map((name) => name.slice(6)),
};

// ---- calls to the server

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  for (;;) {
    const key = ownKey();
    const headers = { ...(options.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(BASE + path, { ...options, headers, cache: "no-store" });
    if (response.status === 401) await askForKey(key);
    else if (response.ok) return response;
    else throw new ServerError(response.status, await messageOf(response));
  }
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `the server answered ${response.status}`;
  }
}

/** One dialog, however many calls wait for it. Resolves when there is another key than `refused`. */
function askForKey(refused) {
  if (ownKey() !== refused) return Promise.resolve();
  askForKey.asked ??= new Promise((resolve) => {
    ui.keyNote.textContent = refused ? "The server does not know this key." : "This server requires an API key.";
    ui.keyDialog.addEventListener("close", () => {
      session.setItem("quire.key", ui.key.value.trim());
      askForKey.asked = null;
      resolve();
    }, { once: true });
    ui.keyDialog.showModal();
  });
  return askForKey.asked;
}

/** The events of a stream, as {name, data}: `EventSource` cannot send a key. */
async function* readEvents(response, heard) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let seen = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard?.();
      rest += decoder.decode(value, { stream: true });
      for (let end; (end = rest.indexOf("\n\n", seen)) >= 0; seen = 0) {
        const event = { name: "message", data: "" };
        for (const line of rest.slice(0, end).split("\n")) {
          if (line.startsWith("data:")) event.data += line.slice(line[5] === " " ? 6 : 5);
          else if (line.startsWith("event:")) event.name = line.slice(6).trim();
        }
        rest = rest.slice(end + 2);
        if (event.data) yield event;
      }
      seen = Math.max(0, rest.length - 1);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---- numbers for people

const count = (n) => (n < 10000 ? String(Math.round(n)) : n < 1e6 ? `${(n / 1000).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(1)}M`);
const rate = (n) => (n < 10 ? n.toFixed(1) : count(n));

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
