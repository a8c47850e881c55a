// Deltas end up as the text the server has, however they are cut, repeated or merged.
import assert from "node:assert/strict";
import test from "node:test";
import { applyDelta, codePoints } from "../app/text.js";

const piece = (text, off, end) => ({ off, end, text: Array.from(text).slice(off, end).join("") });

test("code points are counted, not UTF-16 units", () => {
  assert.equal(codePoints("a😀é"), 3);
  assert.equal(codePoints("e\u0301"), 2);
  assert.equal(codePoints("👩‍👩‍👧"), 5);
  assert.equal(codePoints(""), 0);
});

test("any cutting, overlapping or repeating of a text gives the text", () => {
  const text = "Grüße 😀😃 e\u0301 👩‍👩‍👧 שלום\n```x```";
  const length = codePoints(text);
  let seed = 7;
  const random = (below) => {
    seed = (seed * 1103515245 + 12345) % 2 ** 31;
    return seed % below;
  };
  for (let round = 0; round < 300; round += 1) {
    let state = { text: "", have: 0 };
    while (state.have < length) {
      const off = random(state.have + 1);
      const end = Math.min(length, off + 1 + random(9));
      const next = applyDelta(state.text, state.have, piece(text, off, end));
      assert.notEqual(next, null);
      assert.ok(next.have >= state.have);
      assert.ok(text.startsWith(next.text), "what is shown is always a prefix");
      state = next;
    }
    assert.equal(state.text, text);
  }
});

test("a gap is reported and changes nothing", () => {
  assert.equal(applyDelta("ab", 2, { off: 3, end: 4, text: "d" }), null);
});

test("a piece that is already there changes nothing", () => {
  assert.deepEqual(applyDelta("abc", 3, { off: 1, end: 3, text: "bc" }), { text: "abc", have: 3 });
});
