// The line under an answer says what was measured, and nothing that was not.
import assert from "node:assert/strict";
import test from "node:test";
import { backoff } from "../app/connection.js";
import { truthLine, waitingText } from "../app/format.js";

test("a finished answer", () => {
  const m = { state: "done", tokens: 0, error: null, usage: { prompt_tokens: 1512, completion_tokens: 40, prompt_tokens_details: { cached_tokens: 480 } }, timings: { ttft: 412, tok_s: 31.2 } };
  assert.equal(truthLine(m), "prompt 1,512 tok (480 from cache) · TTFT 0.4 s · 31 tok/s · 40 tok");
});

test("what is unknown is left out", () => {
  assert.equal(truthLine({ state: "stopped", tokens: 0, usage: null, timings: null, error: null }), "stopped");
  assert.equal(truthLine({ state: "running", tokens: 3, usage: { prompt_tokens: 9, cached_tokens: 0 }, timings: null, error: null }), "prompt 9 tok · 3 tok");
});

test("waiting", () => {
  assert.equal(waitingText({ state: "queued", position: 3 }), "Waiting, 2 ahead");
  assert.equal(waitingText({ state: "queued", position: 1 }), "Waiting, next in line");
});

test("reconnecting waits at random, longer each time, never more than 15 s", () => {
  for (let attempt = 0; attempt < 40; attempt += 1) {
    assert.equal(backoff(attempt, () => 0), 0);
    assert.ok(backoff(attempt, () => 1) <= 15000);
    assert.ok(backoff(attempt + 1, () => 1) >= backoff(attempt, () => 1));
  }
  assert.ok(backoff(0, () => 1) <= 500);
});
