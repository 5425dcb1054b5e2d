// Toasts, alerts and dialogs: questions, help, history, downloads.

import { caseUrl, client, get, post } from "./api.js";

const dialog = document.getElementById("dialog");

// Create an element: make("p", {className: "faint"}, "text", child, ...).
export function make(tag, properties = {}, ...children) {
  const { dataset, ...rest } = properties;
  const node = Object.assign(document.createElement(tag), rest);
  for (const [key, value] of Object.entries(dataset ?? {})) node.dataset[key] = value;
  node.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

export function toast(text, bad = false) {
  const note = make("p", { className: bad ? "bad" : "" }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), bad ? 9000 : 3500);
}

// Alert above the image while strokes cannot be saved; null removes it.
export function alarm(problem, again) {
  const box = document.getElementById("alert");
  box.hidden = !problem;
  if (!problem) { box.replaceChildren(); return; }
  const kept = "Your strokes are kept in this page, and saving is retried every few seconds; keep the page open.";
  const text = `${sentence(problem.message)} ${problem.lost ? "These strokes cannot be saved." : `${/terminal/.test(problem.message) ? "" : WAY_OUT[problem.status] ?? ""} ${kept}`}`;
  if (box.dataset.text === text && box.childElementCount) return; // announce once, not on every retry
  box.dataset.text = text;
  box.replaceChildren(make("b", {}, "Your last strokes are not saved."), make("span", {}, text),
    problem.lost ? make("button", { onclick: () => alarm(null) }, "Close") : make("button", { onclick: again }, "Retry now"));
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1).replace(/([^.?!])$/, "$1.");
const WAY_OUT = {
  401: "Open the URL printed by pclmix serve.",
  403: "Open the URL printed by pclmix serve.",
  500: "The terminal of pclmix serve shows details.",
  undefined: "Start it again with pclmix serve, on the same port.",
};

// Show a dialog and wait for one of the buttons [value, text, is main]; Escape means the first.
export function ask(title, content, buttons) {
  return new Promise((resolve) => {
    const end = make("div", { className: "end" });
    for (const [value, text, main] of buttons)
      end.append(make("button", { className: main ? "main" : "", onclick: () => close(value) }, text));
    const close = (value) => { dialog.onclose = null; dialog.close(); resolve(value); };
    dialog.replaceChildren(make("h2", { id: "dialog-title" }, title), ...[content].flat(), end);
    dialog.onclose = () => resolve(buttons[0][0]);
    dialog.showModal();
    end.querySelector(".main")?.focus();
  });
}

const KEYS = [
  ["Drag", "draw"], ["Wheel or ↑ ↓", "previous or next slice"],
  ["1 … 9", "choose a class"], ["Ctrl + wheel, pinch, + −", "zoom"],
  ["0", "background"], ["Space + drag", "move the image"],
  ["E", "eraser"], ["Right button + drag", "level and width"],
  ["[ ]", "pen size"], ["F", "fit to the window"],
  ["Ctrl + Z", "undo"], ["R", "automatic window"],
  ["Ctrl + Shift + Z", "redo"], ["H", "hide or show strokes"],
  ["C", "clear this slice"], ["O", "prediction on or off"],
  ["← →", "previous or next case"], ["U", "uncertainty on or off"],
  ["G", "next place to draw"], ["D", "changes on or off"],
  ["I", "interpolate between drawn slices"], ["A", "accept this slice"],
  ["Home End", "first or last slice"], ["Shift + click", "take over one region"],
  ["P", "one plane or three"],
  ["X, or Alt + drag", "move the crosshair"], ["Shift + arrows", "the same, on the image"],
  ["Enter", "pen down and up there"], ["?", "this list"],
];

export function help() {
  const keys = make("div", { className: "keys" });
  for (const [key, text] of KEYS) keys.append(make("kbd", {}, key), make("span", {}, text));
  const words = make("p", { className: "faint" },
    "Draw a short stroke on each structure and on the background around it, in a few slices. Then train: the model predicts ",
    "the rest. Review the prediction, draw where it is wrong, and train again. Everything is saved as you draw.");
  return ask("Help", [words, keys], [["close", "Close", true]]);
}

export function conflict() {
  const text = make("p", {}, "These strokes were changed in another window or by another program. Nothing has been overwritten.");
  return ask("Changed elsewhere", [text], [["theirs", "Use theirs"], ["both", "Keep both, mine on top", true]]);
}

const WORDS = {
  strokes: "strokes", undo: "undo", redo: "redo", clear: "slice cleared", accept: "prediction accepted",
  between: "interpolated between slices", merge: "merged with another window", label: "labels from another program", restored: "earlier state restored",
};

export async function history(strokes, reload) {
  await strokes.flush();
  const past = await get(caseUrl(strokes.name, "history"));
  const list = make("div", { className: "past" });
  for (const { id, time, what } of past) {
    const when = new Date(time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
    list.append(make("button", {
      onclick: async () => {
        try {
          await post(caseUrl(strokes.name, "history"), { version: strokes.version, id, client });
          await reload();
          toast("Earlier state restored. The state before it is in the history, too.");
        } catch (error) { toast(error.message, true); }
        dialog.close();
      },
    }, make("span", {}, `Before ${when}`), make("span", { className: "faint" }, WORDS[what] ?? what)));
  }
  if (!past.length) list.append(make("p", { className: "faint" }, "No changes yet."));
  return ask("History", [list], [["close", "Close"]]);
}

export function download() {
  const link = (href, text) => make("p", {}, make("a", { href, download: "", className: "button" }, text));
  return ask("Download", [
    link("/api/export/dataset.zip", "The dataset: images and strokes (zip)"),
    link("/api/export/predictions.zip", "The newest predictions (zip)"),
  ], [["close", "Close"]]);
}
