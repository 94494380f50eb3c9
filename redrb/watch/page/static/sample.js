// One sample of a group: its images, prompt, response token by token, extras and tensors.
import { element, table, whenOpen } from "./dom.js";
import { decimal } from "./format.js";

const PALEST = 0.05, DARKEST = 6; // log-probs between which a token's colour grows

export function sample(one) {
  const facts = [
    one.reward === null ? null : `reward ${decimal(one.reward)}`,
    one.policy_version === null ? null : `version ${one.policy_version}`,
    one.status === "completed" ? null : one.status];
  const node = element("details", { class: "sample" },
    element("summary", {}, [`Sample ${one.index + 1}`, ...facts.filter((fact) => fact)].join(", ")));
  whenOpen(node, () => content(one));
  node.open = one.index === 0;
  return node;
}

function content(one) {
  const parts = [];
  for (const image of one.images) {
    parts.push(element("img", { class: "image", src: `data:image/png;base64,${image.png}`, width: image.width, height: image.height, alt: `Image ${image.name}, ${image.width} by ${image.height} pixels` }));
  }
  if (one.tokens) parts.push(...texts(one.tokens));
  if (Object.keys(one.tags).length) parts.push(element("p", { class: "note" }, `Tags: ${JSON.stringify(one.tags)}`));
  if (Object.keys(one.extras).length) {
    const extras = element("details", {}, element("summary", {}, "Extras"));
    whenOpen(extras, () => [element("pre", { class: "text", tabindex: "0" }, JSON.stringify(one.extras, null, 2))]);
    parts.push(extras);
  }
  const fields = element("details", {}, element("summary", {}, "Tensors"));
  whenOpen(fields, () => [tensors(one.fields)]);
  parts.push(fields);
  return parts;
}

function texts(tokens) {
  const more = (shown, total) => (shown < total ? `, ${shown} of ${total} tokens` : "");
  const parts = [];
  if (tokens.prompt_ids.length) {
    parts.push(element("p", { class: "note" }, `Prompt${more(tokens.prompt_ids.length, tokens.prompt_tokens)}`),
      well("Prompt", tokens.prompt_text ?? tokens.prompt_ids.join(" ")));
  }
  if (tokens.response_ids.length) {
    const coloured = tokens.log_probs.length ? "; the stronger the colour of a token, the less probable it was" : "";
    parts.push(element("p", { class: "note" }, `Response${more(tokens.response_ids.length, tokens.response_tokens)}${coloured}`),
      well("Response", tokens.response_ids.map((id, at) => token(tokens, at))));
    const figures = element("details", {}, element("summary", {}, "Figures of each token"));
    whenOpen(figures, () => [element("div", { class: "scroll low", role: "group", tabindex: "0", "aria-label": "Figures of each token" }, figuresOf(tokens))]);
    parts.push(figures);
  }
  return parts;
}

const well = (name, content) => element("div", { class: "text", tabindex: "0", role: "group", "aria-label": name }, content);

function token(tokens, at) {
  const text = tokens.response_pieces.length ? tokens.response_pieces[at] : `${tokens.response_ids[at]} `;
  const log_prob = tokens.log_probs[at] ?? null;
  const node = element("span", { class: tokens.trained[at] === false ? "token untrained" : "token", title: facts(tokens, at) }, text);
  if (log_prob !== null && -log_prob > PALEST) {
    node.style.backgroundColor = `color-mix(in srgb, var(--two) ${Math.round(Math.min(1, -log_prob / DARKEST) * 45)}%, transparent)`;
  }
  return node;
}

function facts(tokens, at) {
  const { log_probs, versions, trained } = tokens;
  return [
    `token ${tokens.response_ids[at]}`,
    log_probs.length ? `log-prob ${decimal(log_probs[at])}` : null,
    versions.length && versions[at] >= 0 ? `version ${versions[at]}` : null,
    trained[at] === false ? "not trained" : null].filter((fact) => fact).join(", ");
}

function figuresOf(tokens) {
  const columns = [["log_probs", "Log-prob"], ["advantages", "Advantage"], ["values", "Value"], ["kl", "KL"], ["versions", "Version"]]
    .filter(([name]) => tokens[name].length);
  return table("Figures of each token", [
    { name: "Token", cell: (at) => tokens.response_ids[at] },
    tokens.response_pieces.length ? { name: "Text", cell: (at) => element("code", {}, tokens.response_pieces[at]) } : null,
    ...columns.map(([name, title]) => ({ name: title, numeric: true, cell: (at) => (name === "versions" ? tokens.versions[at] : decimal(tokens[name][at])) })),
    tokens.trained.length ? { name: "Trained", cell: (at) => (tokens.trained[at] ? "yes" : "no") } : null,
  ].filter((column) => column), tokens.response_ids.map((_, at) => at));
}

function tensors(fields) {
  return element("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": "Tensors" }, table("Tensors", [
    { name: "Name", cell: (field) => field.name },
    { name: "Type", cell: (field) => field.dtype },
    { name: "Shape", cell: (field) => `[${field.shape.join(", ")}]` },
    { name: "Smallest", numeric: true, cell: (field) => decimal(field.low) },
    { name: "Mean", numeric: true, cell: (field) => decimal(field.mean) },
    { name: "Largest", numeric: true, cell: (field) => decimal(field.high) },
    { name: "Not finite", numeric: true, cell: (field) => field.not_finite },
  ], fields));
}
