// Keeps the chat over a reload of the page, in the tab's own storage: the text as it was shown, and which conversation
// on which start of the server it is. Knows the state's shape; what happened to the server meanwhile is for the reducer.
// @ts-check

const KEY = "chatserve.chat";
const VERSION = 1;
const OPEN = ["sending", "queued", "running"];

/**
 * @typedef {object} Kept
 * @property {number} version
 * @property {string | null} tenant whose chat it is; nobody else is shown it
 * @property {string | null} boot
 * @property {string | null} conv
 * @property {import("./reducer.js").Message[]} messages
 */

/**
 * @param {() => Pick<Storage, "setItem" | "removeItem">} storage where it may be blocked, asking for it throws
 * @param {import("./reducer.js").State} state
 */
export function remember(storage, { tenant, boot, conv, messages }) {
  try {
    const items = storage();
    items.removeItem(KEY); // first: of a chat longer than the browser keeps, nothing is better than an old state
    if (messages.length > 0) items.setItem(KEY, JSON.stringify({ version: VERSION, tenant, boot, conv, messages }));
  } catch {
    // The page works without: a reload then starts a new chat.
  }
}

/**
 * What was remembered, or null if there is nothing that can be shown. An answer that was being written ended with the
 * page that watched it.
 * @param {() => Pick<Storage, "getItem">} storage @returns {Kept | null}
 */
export function recall(storage) {
  const error = "The page was reloaded, and the answer ended there.";
  try {
    const kept = JSON.parse(storage().getItem(KEY) ?? "null");
    if (kept?.version !== VERSION) return null;
    return { ...kept, messages: kept.messages.map((/** @type {any} */ m) => (OPEN.includes(m.state) ? { ...m, state: "failed", error } : m)) };
  } catch {
    return null; // blocked by the browser, or not what we wrote
  }
}
