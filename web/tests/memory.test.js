// A chat over a reload: what is kept, what becomes of an answer in the middle, and what must never be shown.
import assert from "node:assert/strict";
import test from "node:test";
import { recall, remember } from "../app/memory.js";
import { initialState, place, reduce } from "../app/reducer.js";

class Storage {
  items = new Map();
  room = Infinity;
  getItem(key) { return this.items.get(key) ?? null; }
  removeItem(key) { this.items.delete(key); }
  setItem(key, value) {
    if (value.length > this.room) throw new Error("QuotaExceededError");
    this.items.set(key, value);
  }
}

const welcome = (boot) => ({ type: "server", message: { type: "welcome", tenant: "acme", server: { boot, model: "tiny" }, active: [] } });
const events = [
  welcome("b1"),
  { type: "send", id: "1", text: "Hi" },
  { type: "server", message: { type: "ack", re: "1", conv: "c1", user_msg: "u1", gens: [{ gen: "g1", msg: "m1" }] } },
  { type: "server", message: { type: "gen.delta", gen: "g1", off: 0, end: 3, text: "Hel", n: 1, seq: 0 } },
];
const running = events.reduce(reduce, initialState());

test("a reload keeps the chat, and the answer that was being written has ended", () => {
  const storage = new Storage();
  remember(() => storage, running);
  const kept = recall(() => storage);
  assert.equal(kept.tenant, "acme");
  const state = [{ type: "recall", kept }, welcome("b1")].reduce(reduce, initialState());
  assert.deepEqual(state.messages.map((m) => [m.role, m.text, m.state]), [["user", "Hi", "done"], ["assistant", "Hel", "failed"]]);
  assert.match(state.messages[1].error, /reloaded/);
  assert.deepEqual(place(state, ""), { conv: "c1", parent: "m1" });
});

test("a server that was restarted meanwhile has forgotten it, and that is said", () => {
  const storage = new Storage();
  remember(() => storage, running);
  const state = [{ type: "recall", kept: recall(() => storage) }, welcome("b2")].reduce(reduce, initialState());
  assert.equal(state.messages.at(-1).role, "divider");
  assert.deepEqual(place(state, ""), {});
});

test("nothing is kept of an empty chat, nor of one that is too long", () => {
  const storage = new Storage();
  remember(() => storage, running);
  remember(() => storage, initialState());
  assert.equal(recall(() => storage), null);
  remember(() => storage, running);
  storage.room = 10;
  remember(() => storage, running);
  assert.equal(recall(() => storage), null);
});

test("storage that is blocked costs the chat, not the page", () => {
  const blocked = () => { throw new DOMException("The operation is insecure.", "SecurityError"); };
  assert.equal(recall(blocked), null);
  assert.doesNotThrow(() => remember(blocked, running));
  assert.doesNotThrow(() => remember(blocked, initialState()));
});

for (const text of ["{not json", '{"version":1}', '{"version":1,"messages":[null]}']) {
  test(`what we did not write is not shown: ${text}`, () => {
    const storage = new Storage();
    storage.setItem("chatserve.chat", text);
    assert.equal(recall(() => storage), null);
  });
}
