// Keeps one WebSocket to the server: hello, heartbeats, reconnecting with full-jitter backoff. Knows the protocol's
// close codes; knows nothing of conversations or of the page. Reports `onMessage(message)` and `onState(state, text)`.
// @ts-check

const SUBPROTOCOL = "chatserve.v1";
const VERSION = "0.1.0";
const FIRST_DELAY = 250;
const LONGEST_DELAY = 15_000;
const HEALTHY_AFTER = 30_000;
const PONG_TIMEOUT = 10_000;
const ENVELOPE_BYTES = 128;

/** Close codes after which trying again is pointless, and what to say. */
const FINAL = new Map([
  [1003, "The server did not understand this page. Reload it."],
  [1007, "The server did not understand this page. Reload it."],
  [1009, "That message was too long for the server."],
  [4400, "The server did not understand this page. Reload it; if that does not help, report it as a bug."],
  [4403, "This page may not talk to the server."],
  [4426, "This page is older than the server. Reload it."],
]);

/** @param {number} attempt from 0 @param {() => number} [random] @returns {number} milliseconds to wait */
export function backoff(attempt, random = Math.random) {
  return random() * Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** (attempt + 1));
}

export class Connection {
  /**
   * @param {string} url
   * @param {{onMessage: (message: any) => void, onState: (state: string, text?: string) => void}} handlers
   */
  constructor(url, handlers) {
    this.url = url;
    this.handlers = handlers;
    /** @type {WebSocket | null} */
    this.socket = null;
    this.ready = false;
    this.attempt = 0;
    this.commands = 0;
    this.heartbeat = 25_000;
    this.longestFrame = Infinity;
    this.notBefore = 0;
    /** @type {Record<string, ReturnType<typeof setTimeout> | undefined>} */
    this.timers = {};
    addEventListener("online", () => this.nudge());
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.nudge());
  }

  /** Open the socket, now. */
  open() {
    clearTimeout(this.timers.retry);
    this.timers.retry = undefined;
    const socket = new WebSocket(this.url, SUBPROTOCOL);
    this.socket = socket;
    socket.addEventListener("open", () => this.command("hello", { client: { name: "web", version: VERSION } }));
    socket.addEventListener("message", (event) => this.socket === socket && this.receive(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => this.socket === socket && this.closed(event.code, event.reason));
  }

  /**
   * Send a command; the caller has checked `ready`.
   * @param {string} type @param {object} fields @returns {string} its id
   */
  command(type, fields) {
    this.commands += 1;
    const id = `${Date.now().toString(36)}-${this.commands}-${Math.random().toString(36).slice(2, 10)}`;
    this.socket?.send(JSON.stringify({ type, id, ...fields }));
    return id;
  }

  /**
   * Whether the server takes a command of this size; one that is too long would cost the connection.
   * @param {object} fields @returns {boolean}
   */
  fits(fields) {
    return new TextEncoder().encode(JSON.stringify(fields)).length + ENVELOPE_BYTES <= this.longestFrame;
  }

  /** @param {any} message */
  receive(message) {
    clearTimeout(this.timers.pong);
    this.timers.pong = undefined;
    if (message.type === "welcome") {
      this.ready = true;
      this.heartbeat = message.heartbeat_ms;
      this.longestFrame = message.limits.max_frame;
      this.timers.healthy = setTimeout(() => (this.attempt = 0), HEALTHY_AFTER);
    } else if (message.type === "server.draining") {
      this.notBefore = Date.now() + message.reconnect_after_ms;
    }
    this.schedulePing();
    this.handlers.onMessage(message);
  }

  schedulePing() {
    clearTimeout(this.timers.ping);
    if (this.ready) this.timers.ping = setTimeout(() => this.ping(), this.heartbeat);
  }

  ping() {
    if (!this.ready || this.timers.pong !== undefined) return;
    this.command("ping", { t: Date.now() });
    this.timers.pong = setTimeout(() => this.drop(), PONG_TIMEOUT);
  }

  /** The network or the reader came back: check the connection now instead of later. */
  nudge() {
    if (this.ready) this.ping();
    else if (this.timers.retry !== undefined) this.open();
  }

  /** The other side is silent: leave without waiting for a closing handshake. */
  drop() {
    const socket = this.socket;
    this.closed(1006, "");
    socket?.close();
  }

  /** @param {number} code @param {string} reason */
  closed(code, reason) {
    this.socket = null;
    this.ready = false;
    for (const name of Object.keys(this.timers)) {
      clearTimeout(this.timers[name]);
      this.timers[name] = undefined;
    }
    if (code === 4401) {
      this.handlers.onState("login");
      return;
    }
    const final = FINAL.get(code);
    if (final !== undefined) {
      this.handlers.onState("closed", final);
      return;
    }
    const asked = code === 4429 ? 1000 * (Number.parseInt(reason, 10) || 1) : Math.max(0, this.notBefore - Date.now());
    this.timers.retry = setTimeout(() => this.open(), asked + backoff(this.attempt));
    this.attempt += 1;
    this.handlers.onState("lost", "Connection lost. Reconnecting …");
  }
}
