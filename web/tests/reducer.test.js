// The page's state after whole exchanges with the server, and after things that go wrong in the middle of one.
import assert from "node:assert/strict";
import test from "node:test";
import { initialState, openAnswer, place, reduce, unwanted } from "../app/reducer.js";

const WELCOME = { type: "welcome", server: { boot: "b1", model: "tiny" }, active: [], heartbeat_ms: 25000 };
const from = (message) => ({ type: "server", message });
const run = (events, state = initialState()) => events.reduce(reduce, state);
const ack = (id, n = 1) => from({ type: "ack", re: id, conv: "c1", user_msg: `u${n}`, gens: [{ gen: `g${n}`, msg: `m${n}` }] });
const delta = (gen, off, text) => from({ type: "gen.delta", gen, off, end: off + text.length, text, n: 1, seq: off });
const done = (gen, end, reason = "stop") => from({ type: "gen.done", gen, end, reason, usage: { prompt_tokens: 5 }, timings: { ttft: 3 } });
const connected = run([from(WELCOME)]);
const asked = run([{ type: "send", id: "1", text: "Hi" }], connected);

test("a whole turn", () => {
  const state = run([ack("1"), delta("g1", 0, "He"), delta("g1", 2, "llo"), done("g1", 5)], asked);
  assert.deepEqual(state.messages.map((m) => [m.role, m.text, m.state, m.id]), [["user", "Hi", "done", "u1"], ["assistant", "Hello", "done", "m1"]]);
  assert.equal(openAnswer(state), null);
  assert.deepEqual(place(state, "sys"), { conv: "c1", parent: "m1" });
});

test("only a beginning carries the system prompt", () => {
  assert.deepEqual(place(connected, "be brief"), { system: "be brief" });
  assert.deepEqual(place(connected, ""), {});
  const failed = run([ack("1"), from({ type: "gen.failed", gen: "g1", end: 0, error: { message: "no" } }), { type: "drop-failed" }], asked);
  assert.deepEqual(place(failed, "be brief"), { conv: "c1", parent: null, system: "be brief" });
});

test("a refused send shows the server's words and leaves the conversation as it was", () => {
  const first = run([ack("1"), delta("g1", 0, "Hello"), done("g1", 5)], asked);
  const state = run([{ type: "send", id: "2", text: "More" }, from({ type: "error", re: "2", error: { message: "The queue is full." } })], first);
  assert.equal(state.messages.at(-1).state, "failed");
  assert.equal(state.messages.at(-1).error, "The queue is full.");
  assert.deepEqual(place(state, ""), { conv: "c1", parent: "m1" });
  assert.equal(run([{ type: "drop-failed" }], state).messages.length, 2);
});

test("stopping keeps what has arrived", () => {
  const state = run([ack("1"), delta("g1", 0, "Hel"), done("g1", 3, "cancelled")], asked);
  assert.equal(state.messages[1].text, "Hel");
  assert.equal(state.messages[1].state, "stopped");
});

test("an answer stopped before it had a name is cancelled as soon as it has one", () => {
  const stopped = run([{ type: "cancel-pending" }], asked);
  const { message } = ack("1");
  assert.deepEqual(unwanted(stopped, message), ["g1"]);
  assert.deepEqual(unwanted(asked, message), []);
  assert.equal(run([ack("1")], stopped).cancelled, false);
});

test("an answer of a chat that was left is cancelled and never shown", () => {
  const left = run([{ type: "new-chat" }], asked);
  assert.deepEqual(unwanted(left, ack("1").message), ["g1"]);
  const state = run([ack("1"), delta("g1", 0, "Hello")], left);
  assert.deepEqual(state.messages, []);
  assert.equal(state.conv, null);
});

test("a lost connection ends the answer visibly, and late text does not revive it", () => {
  const lost = run([ack("1"), delta("g1", 0, "Hel"), { type: "connection", state: "lost", text: "Lost" }], asked);
  assert.equal(lost.messages[1].state, "failed");
  assert.equal(lost.messages[1].text, "Hel");
  const state = run([delta("g1", 3, "lo")], lost);
  assert.equal(state.messages[1].text, "Hel");
  assert.deepEqual(unwanted(state, { ...WELCOME, active: [{ gen: "g1" }, { gen: "another tab's" }] }), ["g1"]);
});

test("a gap or a wrong length is an error, never a silently wrong text", () => {
  assert.equal(run([ack("1"), delta("g1", 2, "llo")], asked).messages[1].state, "failed");
  assert.equal(run([ack("1"), delta("g1", 0, "He"), done("g1", 5)], asked).messages[1].state, "failed");
});

test("a restarted server has forgotten the conversation, and the reader is told", () => {
  const state = run([ack("1"), done("g1", 0), from({ ...WELCOME, server: { boot: "b2", model: "tiny" } })], asked);
  assert.equal(state.conv, null);
  assert.match(state.notice.text, /forgotten/);
  assert.deepEqual(place(state, ""), {});
  assert.deepEqual(state.messages.map((m) => m.role), ["user", "assistant", "divider"]);
  const failed = run([{ type: "send", id: "2", text: "New" }, from({ type: "ack", re: "2", conv: "c2", user_msg: "u2", gens: [{ gen: "g2", msg: "m2" }] }), from({ type: "gen.failed", gen: "g2", end: 0, error: { message: "no" } }), { type: "drop-failed" }], state);
  assert.deepEqual(place(failed, ""), { conv: "c2", parent: null }, "nothing above the divider is a parent any more");
});

test("unknown messages and unknown generations change nothing", () => {
  assert.equal(reduce(asked, from({ type: "topic.later", gen: "g1" })), asked);
  assert.equal(reduce(asked, delta("nobody", 0, "x")), asked);
});

test("nothing is changed in place", () => {
  const frozen = (value) => {
    if (value !== null && typeof value === "object") Object.values(value).forEach(frozen);
    return Object.freeze(value);
  };
  const events = [{ type: "send", id: "1", text: "Hi" }, ack("1"), from({ type: "gen.queued", gen: "g1", pos: 2 }), from({ type: "gen.started", gen: "g1", prompt_tokens: 5, cached_tokens: 0 }), delta("g1", 0, "Hello"), done("g1", 5), { type: "connection", state: "lost", text: "x" }, { type: "new-chat" }];
  events.reduce((state, event) => frozen(reduce(state, event)), frozen(connected));
});
