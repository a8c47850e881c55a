// Numbers and states as words. Pure.
// @ts-check

/** @param {any} m an answer @returns {string} the line under it: what it cost, and how fast it came */
export function truthLine(m) {
  const parts = [];
  const prompt = m.usage?.prompt_tokens;
  if (prompt !== undefined) {
    const cached = m.usage.prompt_tokens_details?.cached_tokens ?? m.usage.cached_tokens ?? 0;
    parts.push(`prompt ${count(prompt)} tok${cached > 0 ? ` (${count(cached)} from cache)` : ""}`);
  }
  if (m.timings?.ttft !== undefined) parts.push(`TTFT ${seconds(m.timings.ttft)}`);
  if (m.timings?.tok_s !== undefined) parts.push(`${rate(m.timings.tok_s)} tok/s`);
  const tokens = m.usage?.completion_tokens ?? m.tokens;
  if (tokens > 0) parts.push(`${count(tokens)} tok`);
  if (m.state === "stopped") parts.push("stopped");
  if (m.error === "length") parts.push("cut at the length limit");
  return parts.join(" · ");
}

/** @param {any} m an answer that has no text yet @returns {string} */
export function waitingText(m) {
  if (m.state === "queued") return m.position > 1 ? `Waiting, ${m.position - 1} ahead` : "Waiting, next in line";
  return m.state === "sending" ? "Sending" : "Reading the prompt";
}

/** @param {number} milliseconds */
function seconds(milliseconds) {
  return milliseconds < 95 ? `${Math.max(0.01, milliseconds / 1000).toFixed(2)} s` : `${(milliseconds / 1000).toFixed(1)} s`;
}

/** @param {number} perSecond */
function rate(perSecond) {
  return perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

/** @param {number} n */
function count(n) {
  return n.toLocaleString("en-US");
}
