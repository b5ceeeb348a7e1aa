// Puts the page together: views, keys of the keyboard, light and dark.

const SUGGESTIONS = [
  "What is paged attention, and why does it help?",
  "Write a Python function that merges two sorted lists.",
  "Explain a quire of paper in three sentences.",
  "List three ways to boil an egg, as a table.",
];
const THEMES = ["auto", "light", "dark"];
const DARK = matchMedia("(prefers-color-scheme: dark)");
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

function showView() {
  const [name, id] = location.hash.slice(1).split("/");
  view.shown = name === "engine";
  view.stale = true;
  ui.chatView.hidden = view.shown;
  ui.engineView.hidden = !view.shown;
  for (const link of ui.views.children) link.ariaCurrent = link.hash === (view.shown ? "#engine" : "#chat") ? "page" : null;
  showMenu(false);
  if (view.shown && id) chooseAnswer(decodeURIComponent(id));
  else if (!view.shown) scrollDown();
}

function showMenu(open) {
  document.body.classList.toggle("menuOpen", open);
}

function showTheme() {
  const theme = kept.get("theme", "auto");
  Object.assign(document.documentElement.dataset, { theme, dark: theme === "dark" || (theme === "auto" && DARK.matches) });
  view.still = STILL.matches;
  view.stale = true;
  ui.theme.title = ui.theme.ariaLabel = `Colours: ${theme}`;
  ui.theme.replaceChildren(icon(theme));
}

function nextTheme() {
  kept.set("theme", THEMES[(THEMES.indexOf(kept.get("theme", "auto")) + 1) % THEMES.length]);
  showTheme();
}

function showTab(tab) {
  view.tab = tab;
  view.stale = true;
  ui.tabActive.ariaPressed = tab === "active";
  ui.tabFinished.ariaPressed = tab === "finished";
}

function showPanel(open = !document.body.classList.contains("settingsOpen")) {
  document.body.classList.toggle("settingsOpen", open);
  ui.settingsToggle.ariaExpanded = open;
  if (open) ui.settings.querySelector("textarea").focus();
}

function submitPrompt(event) {
  event.preventDefault();
  const text = ui.prompt.value;
  if ((!text.trim() && !pictures.waiting.length) || chats.live) return;
  ui.prompt.value = "";
  fitPrompt();
  say(text);
}

function fitPrompt() {
  ui.prompt.style.height = "auto";
  ui.prompt.style.height = `${Math.min(ui.prompt.scrollHeight, innerHeight * 0.4)}px`;
  showComposer();
}

function onPromptKey(event) {
  if (sends(event)) submitPrompt(event);
  else if (event.key === "ArrowUp" && !ui.prompt.value) editLast();
}

function newChat() {
  location.hash = "#chat";
  showMenu(false);
  chats.add();
}

const SHORTCUTS = {
  KeyN: newChat,
  KeyE: () => (location.hash = view.shown ? "#chat" : "#engine"),
  KeyR: regenerate,
  KeyS: () => showPanel(),
  KeyX: () => showExport(),
  KeyK: () => ui.prompt.focus(),
};

function onKey(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (chats.live) stopAnswer();
    else showPanel(false);
    showMenu(false);
  }
  if (event.key === "?" && !event.target.matches("input, textarea, select")) ui.helpDialog.showModal();
  if (!event.altKey || event.ctrlKey || event.metaKey || !SHORTCUTS[event.code]) return;
  event.preventDefault();
  SHORTCUTS[event.code]();
}

function forgetKey() {
  session.removeItem("quire.key");
  location.reload();
}

function closeRequest() {
  view.chosen = null;
  if (view.shown) history.replaceState(null, "", "#engine");
}

function point(x) {
  view.pointed = x;
  view.stale = true;
}

function begin() {
  dress();
  dressEngine();
  ui.suggestions.append(...SUGGESTIONS.map((text) => el("button", { onclick: () => say(text) }, text)));
  const clicks = {
    stop: stopAnswer, new: newChat, menu: () => showMenu(true), shade: () => showMenu(false), theme: nextTheme, help: () => ui.helpDialog.showModal(),
    settingsToggle: () => showPanel(), settingsClose: () => showPanel(false), settingsReset: resetSettings, export: () => showExport(),
    exportChats, importChats: () => ui.importFile.click(), forgetKey, tabActive: () => showTab("active"), tabFinished: () => showTab("finished"),
  };
  for (const [id, act] of Object.entries(clicks)) ui[id].addEventListener("click", act);
  ui.composer.addEventListener("submit", submitPrompt);
  ui.search.addEventListener("input", listChats);
  ui.importFile.addEventListener("change", async () => {
    if (ui.importFile.files[0]) await importChats(ui.importFile.files[0]);
    ui.importFile.value = ""; // the same file may come again
  });
  ui.picture.addEventListener("click", () => ui.pictureFile.click());
  ui.pictureFile.addEventListener("change", async () => {
    await pictures.add(ui.pictureFile.files);
    ui.pictureFile.value = "";
  });
  ui.prompt.addEventListener("paste", ({ clipboardData }) => pictures.add(clipboardData.files));
  ui.middle.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  ui.middle.addEventListener("drop", (event) => {
    event.preventDefault();
    pictures.add(event.dataTransfer.files);
  });
  ui.prompt.addEventListener("input", fitPrompt);
  ui.prompt.addEventListener("keydown", onPromptKey);
  ui.model.addEventListener("change", () => kept.set("model", ui.model.value));
  ui.requestDialog.addEventListener("close", closeRequest);
  ui.steps.addEventListener("pointermove", (event) => point(event.offsetX));
  ui.steps.addEventListener("pointerleave", () => point(null));
  ui.forgetKey.hidden = !ownKey();
  addEventListener("pagehide", () => chats.live && chats.save(chats.live.chat));
  addEventListener("keydown", onKey);
  addEventListener("hashchange", showView);
  addEventListener("resize", () => point(null));
  DARK.addEventListener("change", showTheme);
  STILL.addEventListener("change", showTheme);
  showTheme();
  chats.load();
  showView();
  if (matchMedia("(pointer: fine)").matches) ui.prompt.focus();
  setInterval(() => (view.stale = true), 1000); // ages and rates move without events, too
  drawEngine();
  follow();
}

begin();
