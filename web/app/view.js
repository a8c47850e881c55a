// Draws the state into the page, at most once per frame, and only what differs from the last drawing. Knows the DOM
// and the state's shape; decides nothing. `main.js` creates it and reacts to what the reader does.
// @ts-check
import { truthLine, waitingText } from "./format.js";
import { MarkdownView } from "./markdown_view.js";
import { openAnswer } from "./reducer.js";

const IDEAS = [
  "Explain how a rainbow forms, in three sentences",
  "Write a short poem about a lighthouse in winter",
  "Give me five questions for a first interview",
];
const NEAR_BOTTOM = 48;

/** @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

export class View {
  /** @param {{onIdea: (text: string) => void, onRetry: () => void}} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    /** @type {any} */
    this.state = null;
    /** @type {any} */
    this.drawn = null;
    /** @type {Map<string, {item: HTMLElement, message: any, markdown: MarkdownView | null}>} */
    this.rows = new Map();
    this.frame = 0;
    this.follow = true;
    this.scroll = byId("scroll");
    this.scroll.addEventListener("scroll", () => this.scrolled(), { passive: true });
    byId("latest").addEventListener("click", () => this.toBottom());
    for (const idea of IDEAS) {
      const button = make("button", "", idea);
      button.setAttribute("type", "button");
      button.addEventListener("click", () => handlers.onIdea(idea));
      const item = document.createElement("li");
      item.append(button);
      byId("ideas").append(item);
    }
  }

  /** @param {any} state */
  show(state) {
    this.state = state;
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const { state, drawn } = this;
    this.drawn = state;
    this.drawBar(state);
    this.drawNotice(state.notice);
    if (drawn === null || drawn.messages !== state.messages) this.drawMessages(state.messages);
    this.drawComposer(state);
    this.announce(drawn, state);
    if (this.follow) this.scroll.scrollTop = this.scroll.scrollHeight;
    this.drawPill();
  }

  /** @param {any} state */
  drawBar(state) {
    setText(byId("model"), state.model);
    setText(byId("empty-model"), state.model === "" ? "Connecting …" : `${state.model} is listening. Nothing you write leaves this server.`);
    const begun = state.messages.length > 0;
    byId("system").disabled = begun;
    setText(byId("system-hint"), begun ? "It is fixed while a conversation runs; a new chat can have another." : "It applies to the chat you are about to begin.");
    byId("empty").hidden = begun;
    byId("messages").hidden = !begun;
  }

  /** @param {{text: string, bad: boolean} | null} notice */
  drawNotice(notice) {
    const element = byId("notice");
    element.hidden = notice === null;
    setText(element, notice?.text ?? "");
    element.classList.toggle("bad", notice?.bad ?? false);
  }

  /** @param {any} state */
  drawComposer(state) {
    const answering = openAnswer(state) !== null;
    const hadFocus = document.activeElement === byId("stop");
    byId("stop").hidden = !answering;
    byId("send").hidden = answering;
    byId("send").disabled = state.connection !== "open" || byId("input").value.trim() === "";
    if (hadFocus && !answering) byId("input").focus(); // the button it was on has gone
  }

  /** @param {any[]} messages */
  drawMessages(messages) {
    const keep = new Set(messages.map((m) => m.key));
    for (const [key, row] of this.rows) {
      if (!keep.has(key)) {
        row.item.remove();
        this.rows.delete(key);
      }
    }
    messages.forEach((message, index) => {
      let row = this.rows.get(message.key);
      if (row === undefined) {
        row = { item: newRow(message.role), message: null, markdown: null };
        if (message.role === "assistant") row.markdown = new MarkdownView(part(row.item, ".body"));
        this.rows.set(message.key, row);
        byId("messages").append(row.item);
      }
      if (row.message !== message) {
        row.message = message;
        if (message.role === "user") setText(part(row.item, ".body"), message.text);
        else if (message.role === "divider") setText(row.item, message.text);
        else this.drawAnswer(row, message, index === messages.length - 1);
      }
    });
  }

  /** @param {{item: HTMLElement, markdown: MarkdownView | null}} row @param {any} m @param {boolean} last */
  drawAnswer(row, m, last) {
    const open = m.state === "sending" || m.state === "queued" || m.state === "running";
    const waiting = open && m.text === "";
    part(row.item, ".wait").hidden = !waiting;
    part(row.item, ".body").hidden = waiting || m.text === "";
    part(row.item, "article").setAttribute("aria-busy", String(open));
    row.markdown?.update(m.text);
    setText(part(row.item, ".truth"), waiting ? waitingText(m) : truthLine(m));
    const failure = part(row.item, ".failure");
    failure.hidden = m.state !== "failed";
    failure.replaceChildren();
    if (m.state === "failed") {
      failure.append(make("span", "", m.error));
      if (last) {
        const retry = make("button", "", "Try again");
        retry.setAttribute("type", "button");
        retry.addEventListener("click", () => this.handlers.onRetry());
        failure.append(retry);
      }
    }
  }

  /** @param {any} before @param {any} now */
  announce(before, now) {
    const was = before?.messages.at(-1);
    const is = now.messages.at(-1);
    if (is === undefined || is.role !== "assistant" || (was?.key === is.key && was.state === is.state)) return;
    /** @type {Record<string, string>} */
    const words = { sending: "Sent.", queued: "Waiting in the queue.", running: "Answering.", stopped: "Stopped.", failed: `The answer failed. ${is.error}` };
    setText(byId("status"), is.state === "done" ? `Answer: ${is.text.slice(0, 600)}` : words[is.state]);
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    this.follow = scrollHeight - scrollTop - clientHeight < NEAR_BOTTOM;
    this.drawPill();
  }

  drawPill() {
    byId("latest").hidden = this.follow || (this.state?.messages.length ?? 0) === 0;
  }

  toBottom() {
    this.follow = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.drawPill();
    byId("input").focus();
  }
}

/** @param {"user" | "assistant" | "divider"} role */
function newRow(role) {
  if (role === "divider") return make("li", "divider");
  return role === "user" ? userRow() : answerRow();
}

function userRow() {
  const item = make("li", "message user");
  const article = document.createElement("article");
  article.setAttribute("aria-label", "You");
  article.className = "body";
  article.dir = "auto";
  item.append(article);
  return item;
}

function answerRow() {
  const item = make("li", "message assistant");
  const article = document.createElement("article");
  article.setAttribute("aria-label", "Answer");
  const body = make("div", "body");
  body.dir = "auto";
  const wait = make("div", "wait");
  wait.setAttribute("aria-hidden", "true");
  wait.append(document.createElement("i"), document.createElement("i"), document.createElement("i"));
  article.append(body, wait);
  item.append(article, make("p", "failure"), make("p", "truth"));
  return item;
}

/** @param {string} name @param {string} className @param {string} [text] */
function make(name, className, text) {
  const element = document.createElement(name);
  if (className !== "") element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** @param {HTMLElement} parent @param {string} selector @returns {any} */
function part(parent, selector) {
  return parent.querySelector(selector);
}

/** @param {HTMLElement} element @param {string} text */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
