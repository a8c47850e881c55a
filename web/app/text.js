// Text that arrives in pieces with offsets. The server counts Unicode code points, JavaScript strings count UTF-16
// units; only this module knows the difference. Pure.
// @ts-check

/** @param {string} text @returns {number} Unicode code points in text */
export function codePoints(text) {
  let count = 0;
  for (let i = 0; i < text.length; i += 1) {
    const unit = text.charCodeAt(i);
    if (unit < 0xdc00 || unit > 0xdfff) count += 1; // a low surrogate belongs to the unit before it
  }
  return count;
}

/**
 * What text and length become when the piece `off`..`end` arrives. Applying a piece twice changes nothing.
 * @param {string} text @param {number} have code points in text
 * @param {{off: number, end: number, text: string}} piece
 * @returns {{text: string, have: number} | null} null where something in between is missing
 */
export function applyDelta(text, have, piece) {
  if (piece.end <= have) return { text, have };
  if (piece.off > have) return null;
  const known = have - piece.off;
  const fresh = known === 0 ? piece.text : Array.from(piece.text).slice(known).join("");
  return { text: text + fresh, have: piece.end };
}
