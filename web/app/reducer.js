// The state of the page and how it changes: one conversation, a connection, what to tell the reader. Pure; objects
// are replaced and never changed, so that the view redraws what differs and nothing else. Knows the protocol's
// messages; knows neither sockets nor the DOM.
// @ts-check
import { applyDelta } from "./text.js";

/**
 * @typedef {object} Message
 * @property {string} key stable for the view
 * @property {"user" | "assistant" | "divider"} role a divider says that the server knows nothing of what is above it
 * @property {string} text
 * @property {number} have code points of text, as the server counts
 * @property {"sending" | "queued" | "running" | "done" | "stopped" | "failed"} state
 * @property {string | null} id of the message on the server
 * @property {string | null} gen of the running answer
 * @property {string | null} error
 * @property {number} position in the queue, 0 where unknown
 * @property {any} usage
 * @property {any} timings
 * @property {number} tokens seen so far
 */

/**
 * @typedef {object} State
 * @property {"connecting" | "open" | "lost" | "login" | "closed"} connection
 * @property {{text: string, bad: boolean} | null} notice
 * @property {string} model
 * @property {string | null} tenant
 * @property {string | null} boot
 * @property {string | null} conv
 * @property {string | null} pending id of the send that is not answered yet
 * @property {boolean} cancelled the pending send was stopped before the server named its answer
 * @property {Message[]} messages
 */

/** @returns {State} */
export function initialState() {
  return { connection: "connecting", notice: null, model: "", tenant: null, boot: null, conv: null, pending: null, cancelled: false, messages: [] };
}

/** @param {State} state @returns {Message | null} the answer that is being written or waited for */
export function openAnswer(state) {
  const last = state.messages.at(-1);
  return last !== undefined && last.role === "assistant" && isOpen(last) ? last : null;
}

/**
 * Where the next message goes: the fields of its chat.send beside the text.
 * @param {State} state @param {string} system the system prompt; only a beginning can have one
 * @returns {{conv?: string, parent?: string | null, system?: string}}
 */
export function place(state, system) {
  const answer = state.messages.findLast((m) => m.role === "assistant" && m.id !== null);
  if (state.conv !== null && answer !== undefined) return { conv: state.conv, parent: answer.id };
  const beginning = system === "" ? {} : { system };
  return state.conv === null ? beginning : { conv: state.conv, parent: null, ...beginning };
}

/**
 * Answers that run on the server although the reader has turned away: stopped before they had a name, of a chat that
 * was left, or lost with an earlier connection. They are to be cancelled.
 * @param {State} state before `received` was applied @param {any} received @returns {string[]} generation ids
 */
export function unwanted(state, received) {
  if (received.type === "welcome") {
    return received.active.map((/** @type {any} */ a) => a.gen).filter((/** @type {string} */ gen) => state.messages.some((m) => m.gen === gen));
  }
  const left = received.type === "ack" && received.gens !== undefined && (received.re !== state.pending || state.cancelled);
  return left ? received.gens.map((/** @type {any} */ g) => g.gen) : [];
}

/**
 * @param {State} state
 * @param {any} event a server message under `message`, or something that happened on the page
 * @returns {State}
 */
export function reduce(state, event) {
  switch (event.type) {
    case "send":
      return send(state, event);
    case "server":
      return server(state, event.message);
    case "connection":
      return connection(state, event);
    case "recall":
      return { ...state, boot: event.kept.boot, conv: event.kept.conv, messages: event.kept.messages };
    case "cancel-pending":
      return { ...state, cancelled: true };
    case "drop-failed":
      return { ...state, messages: state.messages.slice(0, -2) };
    case "new-chat":
      return { ...state, conv: null, pending: null, cancelled: false, messages: [], notice: state.connection === "open" ? null : state.notice };
    default:
      return state;
  }
}

/** @param {State} state @param {{id: string, text: string}} event @returns {State} */
function send(state, { id, text }) {
  const user = message(`${id}/u`, "user", { text, state: "done" });
  const answer = message(`${id}/a`, "assistant", { state: "sending" });
  return { ...state, pending: id, cancelled: false, notice: null, messages: [...state.messages, user, answer] };
}

/** @param {State} state @param {any} received @returns {State} */
function server(state, received) {
  switch (received.type) {
    case "welcome":
      return welcome(state, received);
    case "ack":
      return received.gens !== undefined && received.re === state.pending ? accepted(state, received) : state;
    case "error":
      if (received.re !== undefined && received.re === state.pending) return refused(state, received.error);
      if (received.error.code === "invalid_api_key") return state; // the socket closes, and the page asks for a key
      return { ...state, notice: { text: received.error.message, bad: true } };
    case "gen.queued":
      return update(state, received.gen, (m) => ({ ...m, state: "queued", position: received.pos }));
    case "gen.started":
      return update(state, received.gen, (m) => ({ ...m, state: "running", usage: received }));
    case "gen.delta":
      return update(state, received.gen, (m) => grow(m, received));
    case "gen.done":
      return update(state, received.gen, (m) => finish(m, received));
    case "gen.failed":
      return update(state, received.gen, (m) => ({ ...m, state: "failed", error: received.error.message }));
    case "server.draining":
      return { ...state, notice: { text: "The server is about to restart. Running answers may finish first.", bad: false } };
    default:
      return state; // types of a later version are ignored
  }
}

/** @param {State} state @param {any} received @returns {State} */
function welcome(state, received) {
  const forgotten = state.boot !== null && state.boot !== received.server.boot && state.conv !== null;
  const next = { ...state, connection: /** @type {const} */ ("open"), model: received.server.model, tenant: received.tenant, boot: received.server.boot, notice: null };
  if (!forgotten) return next;
  const divider = message(`forgotten/${received.server.boot}`, "divider", { text: "The server was restarted. What is above is not part of the chat any more." });
  const notice = { text: "The server was restarted and has forgotten this conversation. Your next message starts a new one.", bad: false };
  return { ...next, conv: null, notice, messages: [...state.messages.map((m) => ({ ...m, id: null })), divider] };
}

/** @param {State} state @param {any} ack @returns {State} */
function accepted(state, ack) {
  const [{ gen, msg }] = ack.gens;
  const messages = state.messages.slice();
  const at = messages.length - 2;
  messages[at] = { ...messages[at], id: ack.user_msg };
  messages[at + 1] = { ...messages[at + 1], id: msg, gen };
  return { ...state, conv: ack.conv, pending: null, cancelled: false, messages };
}

/** @param {State} state @param {{message: string}} error @returns {State} */
function refused(state, error) {
  return { ...state, pending: null, messages: replaceLast(state.messages, (m) => ({ ...m, state: "failed", error: error.message })) };
}

/** @param {State} state @param {{state: State["connection"], text?: string, bad?: boolean}} event @returns {State} */
function connection(state, event) {
  const notice = event.text === undefined ? state.notice : { text: event.text, bad: event.bad ?? true };
  const next = { ...state, connection: event.state, notice };
  if (event.state === "open" || openAnswer(state) === null) return next;
  // Without its socket the server stops an answer; what has arrived stays.
  const lost = "The connection was lost, and the answer ended there.";
  return { ...next, pending: null, messages: replaceLast(state.messages, (m) => ({ ...m, state: "failed", error: lost })) };
}

/** @param {Message} m @param {any} delta @returns {Message} */
function grow(m, delta) {
  const grown = applyDelta(m.text, m.have, delta);
  if (grown === null) return { ...m, state: "failed", error: "A part of this answer did not arrive. Try again." };
  if (grown.have === m.have) return m;
  return { ...m, ...grown, state: "running", tokens: m.tokens + delta.n };
}

/** @param {Message} m @param {any} done @returns {Message} */
function finish(m, done) {
  if (done.end !== m.have) return { ...m, state: "failed", error: "A part of this answer did not arrive. Try again." };
  const stopped = done.reason === "cancelled" || done.reason === "abandoned";
  return { ...m, state: stopped ? "stopped" : "done", usage: done.usage, timings: done.timings, error: done.reason === "length" ? "length" : null };
}

/** @param {State} state @param {string} gen @param {(m: Message) => Message} change @returns {State} */
function update(state, gen, change) {
  const index = state.messages.findIndex((m) => m.gen === gen);
  if (index < 0 || !isOpen(state.messages[index])) return state;
  const changed = change(state.messages[index]);
  return changed === state.messages[index] ? state : { ...state, messages: state.messages.with(index, changed) };
}

/** @param {Message[]} messages @param {(m: Message) => Message} change @returns {Message[]} */
function replaceLast(messages, change) {
  return messages.length === 0 ? messages : messages.with(-1, change(messages[messages.length - 1]));
}

/** @param {Message} m */
function isOpen(m) {
  return m.state === "sending" || m.state === "queued" || m.state === "running";
}

/** @param {string} key @param {Message["role"]} role @param {Partial<Message>} fields @returns {Message} */
function message(key, role, fields) {
  return { key, role, text: "", have: 0, state: "done", id: null, gen: null, error: null, position: 0, usage: null, timings: null, tokens: 0, ...fields };
}
