// Keyboard shortcuts, except while typing and for shortcuts of the browser.

import { help } from "./dialogs.js";

export function keys(bench) {
  const go = (by) => () => bench.go(bench.viewer.slice + by);
  const shown = () => Boolean(bench.viewer.grid);
  const table = {
    "?": help, e: () => bench.choose(-1), x: () => bench.choose(-2),
    "[": () => bench.pen(bench.pointer.size - 2), "]": () => bench.pen(bench.pointer.size + 2),
    c: () => bench.clearSlice(), f: () => bench.viewer.fit(), r: () => bench.view.reset(), p: () => bench.view.togglePlanes(),
    o: () => bench.review.toggle("prediction"), u: () => bench.review.toggle("unsure"), d: () => bench.review.toggle("difference"),
    a: () => bench.accept.slice(), g: () => bench.review.next(), i: () => bench.accept.between(),
    "+": () => bench.pointer.zoomHere(1.25), "-": () => bench.pointer.zoomHere(0.8),
    ArrowUp: go(-1), ArrowDown: go(1), PageUp: go(-5), PageDown: go(5),
    Home: () => bench.go(0), End: () => bench.go(bench.viewer.grid.slices - 1),
    ArrowLeft: () => bench.list.step(-1), ArrowRight: () => bench.list.step(1),
    h: () => {
      const range = document.getElementById("stroke-opacity");
      range.value = Number(range.value) ? 0 : 90;
      range.dispatchEvent(new Event("input"));
    },
  };
  document.addEventListener("keydown", (event) => {
    if (document.getElementById("dialog").open) return;
    const { target } = event;
    if (event.key === "Escape" && bench.closeCases()) { event.preventDefault(); return; }
    if (target.matches?.("input:not([type=range]):not([type=checkbox]), select, textarea")) return;
    const command = event.ctrlKey || event.metaKey, key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (command && key === "z") { event.preventDefault(); event.shiftKey ? bench.redo() : bench.undo(); return; }
    if (command && key === "y") { event.preventDefault(); bench.redo(); return; }
    if (command || event.altKey) return;
    if (target.getAttribute?.("role") === "radio" && key.startsWith("Arrow")) { // as in any group of radio buttons
      event.preventDefault();
      const buttons = [...target.parentNode.children], by = key === "ArrowLeft" || key === "ArrowUp" ? -1 : 1;
      const next = buttons[(buttons.indexOf(target) + by + buttons.length) % buttons.length];
      next.focus();
      next.click();
      return;
    }
    if (target.id === "canvas" && bench.pointer.key(event)) { event.preventDefault(); return; }
    if (key === " " && !target.matches?.("button, summary, input")) { event.preventDefault(); bench.pointer.space = true; return; }
    if (/^[0-9]$/.test(key) && Number(key) < bench.dataset.classes.length) { bench.choose(Number(key)); return; }
    if (target.matches?.("input[type=range]") && (key.startsWith("Arrow") || key.startsWith("Page"))) return;
    const action = table[key];
    if (action && (shown() || key === "?")) { event.preventDefault(); action(); }
  });
  document.addEventListener("keyup", (event) => { if (event.key === " ") bench.pointer.space = false; });
}
