// A small Markdown reader: text in, plain objects out. Takes any prefix of a text (answers are shown while they
// grow), never fails, and knows no HTML: a tag in the text is text. Pure; `markdown_view.js` turns the result into
// DOM nodes.
// @ts-check

/**
 * @typedef {{type: "text", text: string} | {type: "code", text: string} | {type: "strong" | "em", children: Inline[]}
 *   | {type: "link", href: string, children: Inline[]} | {type: "break"}} Inline
 * @typedef {{type: "paragraph", raw: string, children: Inline[]} | {type: "heading", raw: string, level: number, children: Inline[]}
 *   | {type: "code", raw: string, lang: string, text: string} | {type: "quote", raw: string, blocks: Block[]}
 *   | {type: "list", raw: string, ordered: boolean, start: number, items: Block[][]} | {type: "rule", raw: string}} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const MAX_DEPTH = 12;

/** @param {string} text @param {number} [depth] @returns {Block[]} */
export function parse(text, depth = 0) {
  const lines = text.split(/\r\n?|\n/);
  /** @type {Block[]} */
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [block, next] = readBlock(lines, at, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

/** @param {string[]} lines @param {number} at @param {number} depth @returns {[Block, number]} */
function readBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence(lines, at);
  const heading = HEADING.exec(line);
  if (heading !== null) return [{ type: "heading", raw: line, level: heading[1].length, children: inline(heading[2] ?? "") }, at + 1];
  if (RULE.test(line)) return [{ type: "rule", raw: line }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  return readParagraph(lines, at);
}

/** @param {string[]} lines @param {number} at @returns {[Block, number]} */
function readFence(lines, at) {
  const [, fence, info] = /** @type {RegExpExecArray} */ (FENCE.exec(lines[at]));
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const next = Math.min(end + 1, lines.length);
  return [{ type: "code", raw: lines.slice(at, next).join("\n"), lang: info.trim().split(/\s+/)[0], text }, next];
}

/** @param {string[]} lines @param {number} at @param {number} depth @returns {[Block, number]} */
function readQuote(lines, at, depth) {
  let end = at;
  const inner = [];
  for (let quoted; end < lines.length && (quoted = QUOTE.exec(lines[end])) !== null; end += 1) inner.push(quoted[1]);
  return [{ type: "quote", raw: lines.slice(at, end).join("\n"), blocks: parse(inner.join("\n"), depth + 1) }, end];
}

/** @param {string[]} lines @param {number} at @param {number} depth @returns {[Block, number]} */
function readList(lines, at, depth) {
  const first = /** @type {RegExpExecArray} */ (ITEM.exec(lines[at]));
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  /** @type {string[][]} */
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = RULE.test(line) ? null : ITEM.exec(line);
    const here = item !== null && item[1].length <= indent + 1;
    if (item !== null && here) {
      if (item[1].length < indent || /\d/.test(item[2]) !== ordered) break;
      items.push([item[3] ?? ""]);
    } else if (line.trim() === "") {
      const next = nextText(lines, end);
      if (next === undefined || (leading(next) <= indent && !sameList(next, indent, ordered))) break;
      items[items.length - 1].push("");
    } else if (leading(line) > indent) {
      items[items.length - 1].push(line.slice(Math.min(leading(line), indent + first[2].length + 1)));
    } else if (lines[end - 1].trim() === "" || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) {
      break;
    } else {
      items[items.length - 1].push(line.trim()); // a lazy continuation of the item's paragraph
    }
    end += 1;
  }
  const raw = lines.slice(at, end).join("\n");
  const blocks = items.map((item) => parse(item.join("\n"), depth + 1));
  return [{ type: "list", raw, ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items: blocks }, end];
}

/** @param {string[]} lines @param {number} at @returns {string | undefined} the next line that is not blank */
function nextText(lines, at) {
  let end = at;
  while (end < lines.length && lines[end].trim() === "") end += 1;
  return lines[end];
}

/** @param {string} line @param {number} indent @param {boolean} ordered */
function sameList(line, indent, ordered) {
  const item = ITEM.exec(line);
  return item !== null && item[1].length >= indent && /\d/.test(item[2]) === ordered;
}

/** @param {string} line */
function leading(line) {
  return line.length - line.trimStart().length;
}

/** @param {string[]} lines @param {number} at @returns {[Block, number]} */
function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !interrupts(lines[end])) end += 1;
  const raw = lines.slice(at, end).join("\n");
  return [{ type: "paragraph", raw, children: inline(raw) }, end];
}

/** @param {string} line */
function interrupts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || /^ {0,3}([-*+]|1[.)])\s+\S/.test(line);
}

// What can begin something inside a line; everything else is plain text.
const SPECIAL = /[\\`*_[!\n]|https?:\/\//g;
const URL_END = /[\s<>"'`]|$/;

/** @param {string} text @param {number} [depth] @returns {Inline[]} */
export function inline(text, depth = 0) {
  /** @type {Inline[]} */
  const out = [];
  let plain = "";
  let at = 0;
  /** @type {Set<string>} */
  const unclosed = new Set(); // marks that nothing closes any more: looked for once, which keeps this linear
  const flush = () => {
    if (plain !== "") out.push({ type: "text", text: plain });
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (found === null || depth > MAX_DEPTH) {
      plain += text.slice(at);
      break;
    }
    plain += text.slice(at, found.index);
    at = found.index;
    const read = readInline(text, at, depth, unclosed);
    if (read === null) {
      plain += text[at];
      at += 1;
    } else if (typeof read[0] === "string") {
      plain += read[0];
      at = read[1];
    } else {
      flush();
      out.push(read[0]);
      at = read[1];
    }
  }
  flush();
  return out;
}

/** @param {string} text @param {number} at @param {number} depth @param {Set<string>} unclosed @returns {[Inline | string, number] | null} */
function readInline(text, at, depth, unclosed) {
  switch (text[at]) {
    case "\\":
      return at + 1 < text.length && /[!-/:-@[-`{-~]/.test(text[at + 1]) ? [text[at + 1], at + 2] : null;
    case "\n":
      return [{ type: "break" }, at + 1];
    case "`":
      return readCode(text, at, unclosed);
    case "*":
    case "_":
      return readEmphasis(text, at, depth, unclosed);
    case "!":
      return text[at + 1] === "[" ? readLink(text, at + 1, depth) : null; // an image is a link: nothing loads by itself
    case "[":
      return readLink(text, at, depth);
    default:
      return readUrl(text, at);
  }
}

/** @param {string} text @param {number} at @param {Set<string>} unclosed @returns {[Inline | string, number] | null} */
function readCode(text, at, unclosed) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const ticks = "`".repeat(width);
  if (unclosed.has(ticks)) return [ticks, at + width];
  for (let end = text.indexOf(ticks, at + width); end >= 0; end = text.indexOf(ticks, end)) {
    let run = width;
    while (text[end + run] === "`") run += 1;
    if (run === width) {
      const code = text.slice(at + width, end).replaceAll("\n", " ");
      const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
      return [{ type: "code", text: padded ? code.slice(1, -1) : code }, end + width];
    }
    end += run;
  }
  unclosed.add(ticks);
  return [ticks, at + width];
}

/** @param {string} text @param {number} at @param {number} depth @param {Set<string>} unclosed @returns {[Inline | string, number] | null} */
function readEmphasis(text, at, depth, unclosed) {
  const mark = text[at];
  const width = text[at + 1] === mark ? 2 : 1;
  const open = at + width;
  if (/[\s]|^$/.test(text[open] ?? "")) return [mark.repeat(width), open];
  if (mark === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) return [mark.repeat(width), open];
  const marks = mark.repeat(width);
  if (unclosed.has(marks)) return [marks, open];
  for (let end = text.indexOf(marks, open + 1); end >= 0; end = text.indexOf(marks, end + 1)) {
    const single = width === 2 || (text[end - 1] !== mark && text[end + 1] !== mark);
    const tight = !/\s/.test(text[end - 1]);
    const whole = mark !== "_" || !/[\p{L}\p{N}]/u.test(text[end + width] ?? "");
    const widest = width === 2 && text[end + 2] === mark ? 1 : 0; // ***both***: the outer pair is the longer one
    if (single && tight && whole) {
      const children = inline(text.slice(open, end + widest), depth + 1);
      return [{ type: width === 2 ? "strong" : "em", children }, end + widest + width];
    }
  }
  unclosed.add(marks);
  return [marks, open];
}

/** @param {string} text @param {number} at of the opening bracket @param {number} depth @returns {[Inline, number] | null} */
function readLink(text, at, depth) {
  const found = /^\[((?:[^\[\]\\\n]|\\.){0,1000})\]\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s+"[^"\n]{0,500}")?\s*\)/.exec(
    text.slice(at, at + 4096),
  );
  if (found === null) return null;
  const href = safeUrl(found[2]);
  if (href === null) return null;
  const children = inline(found[1], depth + 1).filter((node) => node.type !== "link");
  return [{ type: "link", href, children: children.length > 0 ? children : [{ type: "text", text: href }] }, at + found[0].length];
}

/** @param {string} text @param {number} at @returns {[Inline, number] | null} */
function readUrl(text, at) {
  if (/[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) return null;
  const rest = text.slice(at, at + 2048);
  let raw = rest.slice(0, rest.search(URL_END));
  while (/[.,;:!?*_\]]$/.test(raw) || (raw.endsWith(")") && raw.split(")").length > raw.split("(").length)) raw = raw.slice(0, -1);
  const href = safeUrl(raw);
  return href === null ? null : [{ type: "link", href, children: [{ type: "text", text: raw }] }, at + raw.length];
}

/** @param {string} raw @returns {string | null} the address, where it is an absolute http or https one */
export function safeUrl(raw) {
  if (!/^https?:\/\/[^/\s]/i.test(raw)) return null;
  try {
    const url = new URL(raw);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}
