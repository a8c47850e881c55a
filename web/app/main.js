// The page: wires the reader's actions, the connection, the state and the view together. Holds what changes: the
// current state, and what is left of it after a reload; everything it knows how to do is in the other modules.
// @ts-check
import { Connection } from "./connection.js";
import { recall, remember } from "./memory.js";
import { initialState, openAnswer, place, reduce, unwanted } from "./reducer.js";
import { View, byId } from "./view.js";

let state = initialState();
const storage = () => sessionStorage; // a browser that blocks it throws when it is named
let kept = recall(storage); // of this tab before it was reloaded; shown once the server has said who is asking
const view = new View({ onIdea: (text) => submit(text), onRetry: retry });
const input = byId("input");
const coarse = matchMedia("(pointer: coarse)").matches;

const url = new URL("./v1/ws", location.href);
url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
const connection = new Connection(url.href, { onMessage, onState });

/** @param {any} event */
function dispatch(event) {
  state = reduce(state, event);
  view.show(state);
}

/** @param {any} message */
function onMessage(message) {
  if (message.type === "welcome" && kept !== null) {
    if (kept.tenant === message.tenant) dispatch({ type: "recall", kept });
    kept = null;
  }
  const gone = unwanted(state, message);
  dispatch({ type: "server", message });
  for (const gen of gone) connection.command("gen.cancel", { gen });
}

/** @param {string} name @param {string} [text] */
function onState(name, text) {
  dispatch({ type: "connection", state: name, text });
  if (name === "login" && !byId("login").open) byId("login").showModal();
}

/** @param {string} text */
function submit(text) {
  if (text.trim() === "" || !connection.ready || openAnswer(state) !== null) return false;
  const temperature = byId("temperature").valueAsNumber;
  const params = Number.isNaN(temperature) ? {} : { temperature };
  const fields = { content: text, params, ...place(state, byId("system").value.trim()) };
  if (!connection.fits(fields)) {
    dispatch({ type: "connection", state: "open", text: "That message is too long for the server. Shorten it." });
    return false;
  }
  const id = connection.command("chat.send", fields);
  view.follow = true;
  dispatch({ type: "send", id, text });
  return true;
}

/** Ask again what failed; both messages go, so that the question is not in the history twice. */
function retry() {
  const question = state.messages.at(-2);
  if (question === undefined || !connection.ready) return;
  dispatch({ type: "drop-failed" });
  submit(question.text);
  input.focus(); // the button that was pressed has gone
}

function stop() {
  const answer = openAnswer(state);
  if (answer === null || !connection.ready) return;
  if (answer.gen === null) dispatch({ type: "cancel-pending" });
  else connection.command("gen.cancel", { gen: answer.gen });
}

function newChat() {
  stop();
  dispatch({ type: "new-chat" });
  input.focus();
}

function fitInput() {
  if (!CSS.supports("field-sizing", "content")) {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }
  view.show(state);
}

byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  if (submit(input.value)) {
    input.value = "";
    fitInput();
  }
});
byId("stop").addEventListener("click", stop);
byId("new-chat").addEventListener("click", newChat);
input.addEventListener("input", fitInput);
input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
  if (coarse && !event.ctrlKey && !event.metaKey) return; // on a phone, Enter is a new line
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !byId("login").open) stop();
});
addEventListener("pagehide", () => kept === null && remember(storage, state));
byId("settings-toggle").addEventListener("click", () => {
  const panel = byId("settings");
  panel.hidden = !panel.hidden;
  byId("settings-toggle").setAttribute("aria-expanded", String(!panel.hidden));
  if (!panel.hidden) byId("system").focus();
});
byId("login").addEventListener("cancel", (/** @type {Event} */ event) => event.preventDefault());
byId("login-form").addEventListener("submit", async (/** @type {Event} */ event) => {
  event.preventDefault();
  byId("login-error").textContent = "";
  try {
    const response = await fetch("./ui/login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ key: byId("key").value }),
    });
    if (response.ok) {
      byId("key").value = "";
      byId("login").close();
      connection.open();
      input.focus();
    } else {
      byId("login-error").textContent = (await response.json()).error.message;
    }
  } catch {
    byId("login-error").textContent = "The server did not answer. Try again.";
  }
});

view.show(state);
connection.open();
if (!coarse) input.focus();
