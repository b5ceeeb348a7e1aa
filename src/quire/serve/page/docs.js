// The API reference at /docs: what openapi.json says, as lists of fields, and a form to try each request.

const MOST_SHOWN = 200000; // characters of an answer
const MOST_NESTED = 3; // objects in objects whose fields are listed
// values of the example body; other fields appear in it only if they are required
const EXAMPLES = {
  messages: [{ role: "user", content: "What is the capital of France?" }], prompt: "The capital of France is", input: "What is the capital of France?",
  tokens: [1, 2, 3], max_tokens: 64, max_output_tokens: 64,
};
let schemas = {};

const resolved = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").pop()] || {} : schema || {});
const variants = (schema) => schema.oneOf || schema.anyOf || schema.allOf || [schema];
const plainName = (schema) => (schema.$ref ? schema.$ref.split("/").pop() : schema.const !== undefined ? JSON.stringify(schema.const) : schema.type);

function typeName(schema) {
  const names = variants(schema).map((one) => {
    if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" or ");
    if (one.type === "array") return `list of ${one.items ? typeName(one.items) : "anything"}`;
    return plainName(one) || "anything";
  });
  return [...new Set(names)].filter((name) => name !== "null").join(" or ");
}

/** The schemas of objects that a value may be, through lists and alternatives. */
function objectsIn(schema) {
  return variants(schema).flatMap((one) => {
    if (one.type === "array" && one.items) return objectsIn(one.items);
    return resolved(one).properties ? [one] : resolved(one).oneOf || resolved(one).anyOf ? objectsIn(resolved(one)) : [];
  });
}

function fieldTable(schema, depth = 0) {
  const { properties = {}, required = [] } = resolved(schema);
  const first = (name) => (required.includes(name) ? 0 : 1);
  const rows = Object.entries(properties).sort(([a], [b]) => first(a) - first(b)).map(([name, field]) => {
    const needed = required.includes(name) ? "required" : field.default != null ? `default ${JSON.stringify(field.default)}` : "";
    const inner = depth < MOST_NESTED ? objectsIn(field).map((one) =>
      el("details", {}, el("summary", {}, `Fields of ${plainName(one) || name}`), fieldTable(one, depth + 1))) : [];
    return el("tr", {}, el("td", {}, el("code", {}, name)), el("td", { className: "faint" }, typeName(field)),
      el("td", {}, [field.description, needed].filter(Boolean).join("; "), ...inner));
  });
  const head = el("thead", {}, el("tr", {}, ...["Field", "Type", "Meaning"].map((title) => el("th", { scope: "col" }, title))));
  return el("table", {}, head, el("tbody", {}, ...rows));
}

function exampleBody(schema) {
  const { properties = {}, required = [] } = resolved(variants(schema)[0]);
  const names = Object.keys(properties).filter((name) => required.includes(name) || name in EXAMPLES);
  return Object.fromEntries(names.map((name) => [name, EXAMPLES[name] ?? properties[name].default ?? ""]));
}

function operationView(path, verb, operation) {
  const body = operation.requestBody?.content["application/json"]?.schema;
  const given = (operation.parameters || []).filter((one) => one.in === "path" || one.in === "query");
  const parts = [];
  if (operation.description) parts.push(el("p", {}, operation.description));
  parts.push(el("h3", {}, "Try it"), tryForm(path, verb, given, body));
  if (given.length) {
    const properties = Object.fromEntries(given.map((one) => [one.name, { ...one.schema, description: `in the ${one.in}` }]));
    parts.push(el("h3", {}, "Parameters"), fieldTable({ properties, required: given.filter((one) => one.required).map((one) => one.name) }));
  }
  for (const one of body ? objectsIn(body) : []) parts.push(el("h3", {}, `Body: ${plainName(one)}`), fieldTable(one));
  parts.push(el("h3", {}, "Answers"), ...Object.entries(operation.responses).filter(([status]) => status !== "422").map(answerView));
  const id = `${verb}-${path.replace(/\W+/g, "-")}`;
  const summary = el("summary", {}, el("span", { className: "verb" }, verb.toUpperCase()), el("code", {}, path), el("span", { className: "faint" }, operation.summary || ""));
  return el("details", { className: "operation", id }, summary, el("div", {}, ...parts));
}

function answerView([status, { description, content }]) {
  const objects = objectsIn(content?.["application/json"]?.schema || {});
  const title = `${status}: ${objects.map((one) => plainName(one)).join(" or ") || description}`;
  return objects.length ? el("details", {}, el("summary", {}, title), ...objects.map((one) => fieldTable(one))) : el("p", {}, title);
}

function tryForm(path, verb, given, schema) {
  const inputs = given.map((one) => el("input", { name: one.name, required: one.required }));
  const body = schema && el("textarea", { rows: 8, ariaLabel: "Request body", value: JSON.stringify(exampleBody(schema), null, 2) });
  const shown = el("pre", { tabIndex: 0, ariaLabel: "Answer", hidden: true });
  const address = () => {
    let url = path;
    const query = new URLSearchParams();
    given.forEach((one, i) => {
      if (one.in === "path") url = url.replace(`{${one.name}}`, encodeURIComponent(inputs[i].value));
      else if (inputs[i].value) query.set(one.name, inputs[i].value);
    });
    return `${BASE}${url}${query.size ? `?${query}` : ""}`;
  };
  const buttons = el("div", {}, el("button", { type: "submit", className: "primary" }, "Send"), copyButton(() => curlOf(verb, address(), body?.value)), el("span", { className: "faint" }, "copy as curl"));
  const labels = given.map((one, i) => el("label", {}, one.name, " ", inputs[i]));
  const form = el("form", { className: "try" }, ...labels, body, buttons, shown);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(verb, address(), body?.value, shown);
  });
  return form;
}

function curlOf(verb, address, body) {
  const key = ownKey() ? ' \\\n  -H "Authorization: Bearer $QUIRE_API_KEY"' : "";
  const data = body === undefined ? "" : ` \\\n  -H 'Content-Type: application/json' \\\n  -d '${body.replaceAll("'", "'\\''")}'`;
  return `curl -X ${verb.toUpperCase()} ${location.origin}${address}${key}${data}`;
}

async function send(verb, address, body, shown) {
  shown.hidden = false;
  shown.textContent = "…";
  const key = ownKey();
  const headers = { ...(body !== undefined && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  try {
    const response = await fetch(address, { method: verb.toUpperCase(), headers, body, cache: "no-store" });
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let text = "";
    for (let part; !(part = await reader.read()).done; ) {
      text = (text + decoder.decode(part.value, { stream: true })).slice(0, MOST_SHOWN);
      shown.textContent = `${response.status} ${response.statusText}\n\n${text}`;
    }
    const json = parsed(text);
    shown.textContent = `${response.status} ${response.statusText}\n\n${json === undefined ? text : JSON.stringify(json, null, 2)}`;
  } catch (error) {
    shown.textContent = `No answer: ${error.message}`;
  }
}

function filterOperations() {
  const wanted = ui.filter.value.trim().toLowerCase();
  for (const node of document.querySelectorAll(".operation")) node.hidden = !node.textContent.toLowerCase().includes(wanted);
  for (const section of ui.operations.children) section.hidden = !section.querySelector(".operation:not([hidden])");
}

function showHash() {
  const node = byId(decodeURIComponent(location.hash.slice(1)));
  if (node?.matches(".operation")) node.open = true;
}

async function beginDocs() {
  dress();
  ui.chatLink.href = `${BASE}/`;
  ui.schemaLink.href = `${BASE}/openapi.json`;
  const found = await (await call("/openapi.json")).json();
  schemas = found.components?.schemas || {};
  ui.about.textContent = `${found.info.description} Version ${found.info.version}.`;
  const groups = {};
  for (const [path, item] of Object.entries(found.paths))
    for (const [verb, operation] of Object.entries(item)) (groups[operation.tags?.[0] || "other"] ??= []).push(operationView(path, verb, operation));
  ui.operations.replaceChildren(...Object.entries(groups).map(([name, views]) => el("section", {}, el("h2", {}, name), ...views)));
  ui.filter.addEventListener("input", filterOperations);
  addEventListener("hashchange", showHash);
  showHash();
}

beginDocs().catch((error) => (ui.about.textContent = `The description cannot be loaded: ${error.message}`));
