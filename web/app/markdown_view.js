// Draws parsed Markdown with createElement and text nodes; no HTML string exists anywhere. Redraws only the blocks
// that have changed, so that a growing answer costs its last block and a selection above it survives.
// @ts-check
import { parse } from "./markdown.js";

/** @typedef {import("./markdown.js").Block} Block @typedef {import("./markdown.js").Inline} Inline */

/** One growing text in one element. */
export class MarkdownView {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    /** @type {string[]} */
    this.shown = [];
  }

  /** @param {string} text */
  update(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && this.shown[same] === signature(blocks[same])) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild?.remove();
    for (const block of blocks.slice(same)) this.element.append(drawBlock(block));
    this.shown = blocks.map(signature);
  }
}

/** @param {Block} block */
function signature(block) {
  return `${block.type}\n${block.raw}`;
}

/** @param {Block} block @returns {Node} */
function drawBlock(block) {
  switch (block.type) {
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, block.children.map(drawInline)); // the page has h1 and h2 itself
    case "code":
      return drawCode(block.lang, block.text);
    case "quote":
      return element("blockquote", block.blocks.map(drawBlock));
    case "rule":
      return element("hr", []);
    case "list": {
      const list = element(block.ordered ? "ol" : "ul", block.items.map(drawItem));
      if (block.ordered && block.start !== 1) list.setAttribute("start", String(block.start));
      return list;
    }
    default:
      return element("p", block.children.map(drawInline));
  }
}

/** @param {Block[]} blocks @returns {Node} */
function drawItem(blocks) {
  const [first, ...rest] = blocks;
  if (first?.type !== "paragraph") return element("li", blocks.map(drawBlock));
  return element("li", [...first.children.map(drawInline), ...rest.map(drawBlock)]);
}

/** @param {string} lang @param {string} text @returns {Node} */
function drawCode(lang, text) {
  const copy = element("button", [document.createTextNode("Copy")]);
  copy.setAttribute("type", "button");
  copy.className = "copy";
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const head = element("div", [element("span", [document.createTextNode(lang || "text")]), copy]);
  head.className = "head";
  const pre = element("pre", [element("code", [document.createTextNode(text)])]);
  pre.tabIndex = 0; // it may scroll sideways: reachable by keyboard
  const block = element("div", [head, pre]);
  block.className = "codeblock";
  return block;
}

/** @param {Inline} node @returns {Node} */
function drawInline(node) {
  switch (node.type) {
    case "code":
      return element("code", [document.createTextNode(node.text)]);
    case "strong":
    case "em":
      return element(node.type, node.children.map(drawInline));
    case "break":
      return element("br", []);
    case "link": {
      const link = /** @type {HTMLAnchorElement} */ (element("a", node.children.map(drawInline)));
      link.href = node.href;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      return link;
    }
    default:
      return document.createTextNode(node.text);
  }
}

/** @param {string} name @param {Node[]} children @returns {HTMLElement} */
function element(name, children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
