// Markdown as models write it, into nodes. A model's output is nobody's friend: everything is bounded (depth, how far a mark looks
// for its partner, how long a line may be and still mean something), only http, https and mailto become links, and an image is a
// link, since fetching it would tell its server who reads.

const MOST_DEPTH = 8; // quotes in lists in quotes
const MOST_LINE = 2000; // a longer line is text, whatever it begins with
const MOST_INLINE = 16000; // characters of a paragraph that are searched for marks
const MOST_MARKDOWN = 120000; // characters of an answer; the rest is plain
const MOST_BLOCKS = 1000; // paragraphs, blocks of code, ...; the same
const PIECE = 8000; // characters of plain text in one box, so that a line of a megabyte is laid out only where it is seen
const MOST_COLOURED = 20000; // characters of code

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +(.*)|)$/;
const MATH = /^ {0,3}(\$\$|\\\[)/;
const MATH_ENDS = { "$$": "$$", "\\[": "\\]" };
const TABLE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** Shows a text that grows. Blocks that are complete stay as they are; only what is behind them is made again. */
class MarkdownView {
  constructor() {
    this.root = el("div", { className: "markdown" });
    this.settled = 0;
    this.limit = MOST_MARKDOWN;
    this.tail = null; // plain text, when it has become too much
    this.open = [];
  }

  show(text, over) {
    if (this.root.childElementCount > MOST_BLOCKS) this.limit = Math.min(this.limit, this.settled);
    const most = Math.min(text.length, this.limit);
    if (this.settled < most) {
      const cut = over || text.length > this.limit ? most : settledEnd(text.slice(0, most), this.settled);
      for (const node of this.open) node.remove();
      if (cut > this.settled) this.root.append(...renderMarkdown(text.slice(this.settled, cut)));
      this.settled = cut;
      this.open = renderMarkdown(text.slice(cut, most));
      this.root.append(...this.open);
    }
    if (text.length > most) this.showPlain(text.slice(this.limit));
  }

  showPlain(text) {
    if (!this.tail) this.root.append((this.tail = el("div", { className: "plain" })));
    const boxes = this.tail.children;
    const whole = Math.max(0, boxes.length - 1); // the last one may have been short
    boxes[whole]?.remove();
    this.tail.append(...plainBoxes(text.slice(whole * PIECE)));
  }
}

const renderMarkdown = (text) => renderBlocks(text.split("\n"), 0);

function plainBoxes(text) {
  const boxes = [];
  for (let at = 0; at < text.length; at += PIECE) boxes.push(el("div", { className: "piece" }, text.slice(at, at + PIECE)));
  return boxes;
}

/** Where the last block begins that may still change: behind an empty line, not in code, not in a list. */
function settledEnd(text, from) {
  let fence = null;
  let began = 0;
  let blank = false;
  let end = from;
  for (let at = from; at < text.length; ) {
    const stop = text.indexOf("\n", at);
    const line = text.slice(at, stop < 0 ? text.length : stop);
    const mark = line.length < MOST_LINE ? FENCE.exec(line) || openMath(line) : null;
    const fresh = blank && line.trim() && !/^[ \t>|]/.test(line) && !ITEM.test(line.slice(0, 20));
    if (!fence && (fresh || at - end > MOST_INLINE)) end = at;
    if (fence ? closes(line, fence) || (isMath(fence) && at - began > MOST_TEX) : mark) {
      fence = fence ? null : mark[1];
      began = at;
    }
    blank = !line.trim();
    if (stop < 0) break;
    at = stop + 1;
  }
  return end;
}

/** The end that a formula of several lines waits for, as the second of two; null if this line begins none. */
function openMath(line) {
  const found = MATH.exec(line);
  return found && !line.includes(MATH_ENDS[found[1]], found[0].length) ? [found[0], MATH_ENDS[found[1]]] : null;
}

const isMath = (mark) => Object.values(MATH_ENDS).includes(mark);
const closes = (line, fence) => isMath(fence) ? line.includes(fence) : line.trim().startsWith(fence) && line.trim() === fence[0].repeat(line.trim().length);

function renderBlocks(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    if (nodes.length >= MOST_BLOCKS) return [...nodes, el("div", { className: "plain" }, ...plainBoxes(lines.slice(at).join("\n")))];
    const block = line.length > MOST_LINE || depth > MOST_DEPTH ? null : startBlock(lines, at, depth);
    const [node, next] = block || paragraph(lines, at, depth);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

/** The block that begins at a line, and the line behind it; null if it is a paragraph. */
function startBlock(lines, at, depth) {
  const line = lines[at];
  let found;
  if ((found = FENCE.exec(line))) return codeBlock(lines, at, found);
  if ((found = HEADING.exec(line))) {
    const level = Math.min(found[1].length + 2, 6); // the page has its own first two
    return [el(`h${level}`, {}, ...renderInline(found[2].replace(/ +#+ *$/, ""))), at + 1];
  }
  if (RULE.test(line)) return [el("hr"), at + 1];
  if ((found = MATH.exec(line))) return mathBlock(lines, at, found);
  if (QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const inner = lines.slice(at, end).map((one) => one.replace(QUOTE, ""));
    return [el("blockquote", {}, ...renderBlocks(inner, depth + 1)), end];
  }
  if (ITEM.test(line)) return list(lines, at, depth);
  return beginsTable(lines, at) ? table(lines, at) : null;
}

const beginsTable = (lines, at) => lines[at].includes("|") && (lines[at + 1]?.length ?? MOST_LINE) < MOST_LINE && TABLE.test(lines[at + 1]);

/** Whether a line ends the paragraph above it. */
function interrupts(lines, at) {
  const line = lines[at];
  if (line.length > MOST_LINE) return false;
  const found = ITEM.exec(line);
  if (found) return Boolean(found[4]) && (found[2].length === 1 || parseInt(found[2], 10) === 1);
  return [FENCE, HEADING, RULE, QUOTE, MATH].some((block) => block.test(line)) || beginsTable(lines, at);
}

/** A formula on lines of its own; null if it does not end, or text follows it: then it is a part of a paragraph. */
function mathBlock(lines, at, [begin, mark]) {
  const close = MATH_ENDS[mark];
  const parts = [];
  let length = 0;
  for (let end = at, line = lines[at].slice(begin.length); line !== undefined && length < MOST_TEX; line = lines[++end]) {
    const stop = line.indexOf(close);
    parts.push(stop < 0 ? line : line.slice(0, stop));
    if (stop >= 0) return line.slice(stop + 2).trim() ? null : [mathView(parts.join("\n"), true), end + 1];
    length += line.length + 1;
  }
  return null;
}

/** A formula, or its source where it cannot be read. */
const mathView = (tex, display) => renderMath(tex, display) || el("code", { className: display ? "formula" : "" }, tex.trim());

function codeBlock(lines, at, [, fence, language]) {
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  return [codeView(lines.slice(at + 1, end).join("\n"), language), end + 1];
}

function codeView(code, language) {
  const body = code.length > MOST_COLOURED ? plainBoxes(code) : colour(code, language.toLowerCase());
  return el("figure", { className: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => code)),
    el("pre", { tabIndex: 0, "aria-label": `code${language && `, ${language}`}` }, el("code", {}, ...body)));
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = mark.length > 1;
  const node = el(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark, 10) !== 1) node.start = parseInt(mark, 10);
  let loose = false;
  while (at < lines.length) {
    const found = lines[at].length < MOST_LINE ? ITEM.exec(lines[at]) : null;
    if (!found || found[1].length > indent.length + 1 || found[1].length < indent.length) break;
    if (found[2].length > 1 !== ordered || RULE.test(lines[at])) break;
    const offset = found[1].length + found[2].length + 1;
    const inner = [found[4] || ""];
    for (at += 1; at < lines.length; at += 1) {
      const line = lines[at];
      const depthOf = line.length - line.trimStart().length;
      const blank = !lines[at - 1].trim();
      if (!line.trim()) inner.push("");
      else if (depthOf >= offset || (depthOf > indent.length + 1 && depthOf >= 2)) inner.push(line.slice(Math.min(depthOf, offset)));
      else if (!blank && !ITEM.test(line) && !interrupts(lines, at)) inner.push(line.trimStart());
      else break;
    }
    while (inner.length && !inner.at(-1).trim()) {
      inner.pop();
      loose = true;
    }
    node.append(item(inner, depth));
  }
  if (loose && node.children.length > 1) node.className = "loose";
  return [node, at];
}

function item(lines, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0] || "");
  if (task) lines[0] = lines[0].slice(4);
  const blocks = renderBlocks(lines, depth + 1);
  const box = task && el("input", { type: "checkbox", checked: task[1] !== " ", disabled: true, "aria-label": "done" });
  // a list without empty lines has no paragraphs
  const content = blocks[0]?.tagName === "P" ? [...blocks[0].childNodes, ...blocks.slice(1)] : blocks;
  return el("li", { className: task ? "task" : "" }, box, ...content);
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).slice(0, 50).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
  const row = (line, tag) =>
    el("tr", {}, ...cells(line).slice(0, sides.length).map((cell, i) => {
      const node = el(tag, {}, ...renderInline(cell));
      node.style.textAlign = sides[i];
      return node;
    }));
  const head = el("thead", {}, row(lines[at], "th"));
  const body = el("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].length < MOST_LINE; at += 1) body.append(row(lines[at], "td"));
  return [el("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "table" }, el("table", {}, head, body)), at];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && (depth > MOST_DEPTH || !interrupts(lines, end))) end += 1;
  const text = lines.slice(at, end).join("\n");
  if (text.length > MOST_INLINE) return [el("div", { className: "plain" }, ...plainBoxes(text)), end];
  return [el("p", {}, ...renderInline(text.trim())), end];
}

// ---- inside a line

const SPECIAL = /[\\`*_~[!<$\n]|https?:\/\//g;
const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const MOST_INLINE_DEPTH = 6;
const MOST_LABEL = 400;

function renderInline(text, depth = 0) {
  const nodes = [];
  const lost = new Set(); // marks without a partner: looked for once
  let plain = 0;
  const scan = new RegExp(SPECIAL);
  for (let found; (found = scan.exec(text)); ) {
    const made = inlineAt(text, found.index, depth, lost);
    if (!made) continue;
    if (found.index > plain) nodes.push(text.slice(plain, found.index));
    nodes.push(made[0]);
    plain = scan.lastIndex = made[1];
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

/** The node that begins here and where it ends; null if the character is only a character. */
function inlineAt(text, at, depth, lost) {
  const sign = text[at];
  if (sign === "\n") return [el("br"), at + 1];
  if (sign === "$" || (sign === "\\" && /[([]/.test(text[at + 1] || ""))) {
    const made = inlineMath(text, at, lost);
    if (made || sign === "$") return made;
  }
  if (sign === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] || "") ? [text[at + 1], at + 2] : null;
  if (sign === "`") return inlineCode(text, at, lost);
  if (sign === "h") return /\w/.test(text[at - 1] || "") ? null : bareLink(text, at);
  if (sign === "<") {
    const found = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,400})>/i.exec(text.slice(at, at + 420));
    return found && [link(found[1], [found[1]]), at + found[0].length];
  }
  if (depth >= MOST_INLINE_DEPTH) return null;
  if (sign === "!") return text[at + 1] === "[" ? labelled(text, at + 1, depth, true) : null;
  if (sign === "[") return labelled(text, at, depth, false);
  const pair = PAIRS.find(([mark]) => text.startsWith(mark, at));
  return pair ? emphasis(text, at, pair, depth, lost) : null;
}

const MATH_PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

/** Dollars are formulas only if they touch what they enclose and no digit follows: prices are not. */
function inlineMath(text, at, lost) {
  const [open, close, display] = MATH_PAIRS.find(([mark]) => text.startsWith(mark, at));
  if (lost.has(open)) return null;
  const begin = at + open.length;
  if (open === "$" && /\s/.test(text[begin] || " ")) return null;
  for (let tries = 0, end = begin; tries < 16; tries += 1, end += 1) {
    end = text.indexOf(close, end);
    if (end < 0) {
      lost.add(open);
      return null;
    }
    if (end === begin || end - begin > MOST_TEX) return null;
    if (open !== "$" || (!/[\s\\]/.test(text[end - 1]) && !/\d/.test(text[end + 1] || ""))) return [mathView(text.slice(begin, end), display), end + close.length];
  }
  return null;
}

function inlineCode(text, at, lost) {
  const mark = /^`+/.exec(text.slice(at, at + 20))[0];
  const end = lost.has(mark) ? -1 : text.indexOf(mark, at + mark.length);
  if (end < 0) {
    lost.add(mark);
    return [mark, at + mark.length];
  }
  const code = text.slice(at + mark.length, end);
  return [el("code", {}, code.trim() && /^ .* $/s.test(code) ? code.slice(1, -1) : code), end + mark.length];
}

function emphasis(text, at, [mark, tag], depth, lost) {
  const begin = at + mark.length;
  if (lost.has(mark) || /\s/.test(text[begin] || " ")) return null;
  if (mark[0] === "_" && /\w/.test(text[at - 1] || "")) return null;
  let end = begin;
  for (let tries = 0; tries < 16; tries += 1) {
    end = text.indexOf(mark, end + 1);
    if (end < 0) {
      lost.add(mark);
      return null;
    }
    if (mark.length === 2 && text[end + 2] === mark[0]) end += 1; // the outer two of three
    if (mark.length === 1 && text[end + 1] === mark) end += 1; // one half of a double mark
    else if (!/\s/.test(text[end - 1]) && !(mark[0] === "_" && /\w/.test(text[end + mark.length] || "")))
      return [el(tag, {}, ...renderInline(text.slice(begin, end), depth + 1)), end + mark.length];
  }
  return null;
}

function labelled(text, at, depth, image) {
  let open = 0;
  let close = at;
  for (const last = Math.min(text.length, at + MOST_LABEL); close < last; close += 1) {
    if (text[close] === "[") open += 1;
    else if (text[close] === "]" && --open === 0) break;
  }
  if (text[close] !== "]" || text[close + 1] !== "(") return null;
  const found = /^\(\s*<?((?:[^\s()<>]|\([^\s()]*\))*)>?(?:\s+["'(][^"]*?["')])?\s*\)/.exec(text.slice(close + 1, close + 2000));
  const label = text.slice(at + 1, close);
  if (!found || (!label && !image)) return null;
  const inner = image ? [`image: ${label}`] : renderInline(label, depth + 1);
  return [link(found[1], inner) || el("span", { title: "not a link that this page follows" }, ...inner), close + 1 + found[0].length];
}

function bareLink(text, at) {
  const found = /^https?:\/\/[^\s<>"'`*\]]+/.exec(text.slice(at, at + 1000));
  if (!found) return null;
  let url = found[0].replace(/[.,;:!?]+$/, "");
  if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
  const node = link(url, [url]);
  return node && [node, at + url.length];
}

function link(address, inner) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...inner);
}

// ---- colours of code

const KEYWORDS = new Set(
  ("and as assert async await break case catch class const continue def default defer del do elif else end enum except export extends false " +
    "False fi finally fn for from func function if impl import in int interface is lambda let local loop match mod mut namespace new nil None not " +
    "null or package pass private pub public raise return self static struct super switch then this throw trait true True try type use using var " +
    "void where while with yield SELECT FROM WHERE INSERT UPDATE CREATE JOIN ON GROUP ORDER BY AND OR NOT AS").split(" "),
);
const STRINGS = "\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?|`[^`]*`?";
const REST = "\\b\\d[\\w.]*|[A-Za-z_$][\\w$]*";
const COMMENTS = [
  [/^(py|python|sh|bash|shell|ya?ml|toml|ruby|rb|r|perl|make|dockerfile|julia|ini)$/, "#.*"],
  [/^(sql|lua|haskell)$/, "--.*"],
  [/^(html|xml)$/, "<!--[^]*?(?:-->|$)"],
  [/^(te?xt|plain.*|markdown|md|output|log)?$/, null],
  [/./, "//.*|/\\*[^]*?(?:\\*/|$)"],
];

function colour(code, language) {
  const comments = COMMENTS.find(([languages]) => languages.test(language))[1];
  if (comments === null) return [code];
  const triple = language.startsWith("py") ? '"""[^]*?(?:"""|$)|' : "";
  const nodes = [];
  let at = 0;
  for (const found of code.matchAll(new RegExp(`(${comments})|(${triple}${STRINGS})|${REST}`, "g"))) {
    const kind = found[1] ? "comment" : found[2] ? "string" : /^\d/.test(found[0]) ? "number" : KEYWORDS.has(found[0]) && "keyword";
    if (!kind) continue;
    nodes.push(code.slice(at, found.index), el("span", { className: `c-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  nodes.push(code.slice(at));
  return nodes;
}
