// Markdown becomes the right structure, never loses text, never fails on a prefix, and lets no address through but
// http and https.
import assert from "node:assert/strict";
import test from "node:test";
import { inline, parse, safeUrl } from "../app/markdown.js";

const types = (text) => parse(text).map((block) => block.type);
const flat = (nodes) => nodes.map((n) => n.text ?? (n.type === "break" ? "\n" : flat(n.children))).join("");
const allInline = (nodes) => nodes.flatMap((n) => [n, ...(n.children ? allInline(n.children) : [])]);
const inlines = (blocks) =>
  blocks.flatMap((b) => (b.children ? allInline(b.children) : b.blocks ? inlines(b.blocks) : b.items ? b.items.flatMap(inlines) : []));

const SAMPLE = `# Title

Some *emphasis*, **strong _both_ here**, \`code * not em\`, and a [link](https://example.org/a_(b) "t").
Second line.

- one
- two
  continued
  1. inner
  2. more

3. third
4. fourth

> quoted
> text

\`\`\`python
def f():
    return "<b>"

\`\`\`
---
The end: https://example.org/x?y=1, see.`;

test("the usual blocks are found", () => {
  assert.deepEqual(types(SAMPLE), ["heading", "paragraph", "list", "list", "quote", "code", "rule", "paragraph"]);
  const [, , bullets, numbers, , code] = parse(SAMPLE);
  assert.equal(bullets.items.length, 2);
  assert.equal(bullets.items[1].at(-1).type, "list");
  assert.equal(numbers.start, 3);
  assert.equal(code.lang, "python");
  assert.equal(code.text, 'def f():\n    return "<b>"\n');
});

test("inline marks nest and code is left alone", () => {
  const found = allInline(inline("a *b* **c _d_** `e *f*` ***g***"));
  assert.deepEqual(found.map((n) => n.type).filter((t) => t !== "text"), ["em", "strong", "em", "code", "strong", "em"]);
  assert.equal(found.find((n) => n.type === "code").text, "e *f*");
});

test("what is no mark stays as it was typed", () => {
  for (const text of ["2 * 3 * 4", "snake_case_name", "a ** b", "*unclosed", "`unclosed", "[no](link", "x < y && y > z", "\\", "[]()", "**", "* *"]) {
    assert.equal(flat(inline(text)), text, text);
  }
  assert.equal(flat(inline("\\*plain\\*")), "*plain*");
});

test("every prefix of a text parses, and its words are all there", () => {
  for (let end = 0; end <= SAMPLE.length; end += 1) parse(SAMPLE.slice(0, end));
  const words = (text) => text.match(/[A-Za-z]{3,}/g);
  const prose = "Word *one* and **two** then `three`\n\n1. four\n2. five\n\n> six seven";
  const leaves = inlines(parse(prose)).filter((n) => n.text !== undefined);
  assert.deepEqual(words(leaves.map((n) => n.text).join(" ")), words(prose));
});

test("an unclosed fence is code to the end", () => {
  const [block] = parse("```js\nlet x = 1;\n\n# no heading");
  assert.equal(block.type, "code");
  assert.equal(block.text, "let x = 1;\n\n# no heading");
});

test("only absolute http and https addresses become links", () => {
  for (const bad of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "//evil.example", "/local", "file:///etc/passwd", "http://", "https:evil", "\u0001javascript:x", " javascript:x", "java\nscript:x", "mailto:a@b"]) {
    assert.equal(safeUrl(bad), null, bad);
    assert.deepEqual(inlines(parse(`[x](${bad})`)).filter((n) => n.type === "link" && !n.href.startsWith("http")), [], bad);
  }
  assert.equal(safeUrl("https://example.org/a b"), "https://example.org/a%20b");
  assert.equal(inline("![alt](https://example.org/i.png)")[0].type, "link", "an image is a link");
});

test("bare addresses end before the sentence does", () => {
  const link = inline("(see https://example.org/a_(b).)").find((n) => n.type === "link");
  assert.equal(link.href, "https://example.org/a_(b)");
});

test("hostile nesting and repetition are fast", () => {
  const started = process.cpuUsage(); // of this process alone: the machine may be busy
  for (const evil of ["*".repeat(20000), "[".repeat(20000), "> ".repeat(5000), "- ".repeat(5000), "`".repeat(20001), "*a ".repeat(8000), "[a](".repeat(5000), "_a_".repeat(5000), "**a ".repeat(5000), "\n".repeat(50000), "http://".repeat(5000), "`a``b".repeat(4000)]) parse(evil);
  const milliseconds = process.cpuUsage(started).user / 1000;
  assert.ok(milliseconds < 4000, `${milliseconds} ms`);
});
