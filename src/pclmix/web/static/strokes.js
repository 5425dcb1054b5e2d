// The strokes of the open case: edits with undo, and saving of changes in the background. Failed saves are kept and
// retried. Values are 0 where nothing is drawn, else class + 1; voxels are in native order.

import { caseUrl, client, post, readStrokes } from "./api.js";

const PAUSE = 250; // ms between the last change and the save
const MOST = 300; // maximum number of undo steps
const AGAIN = [3000, 5000, 10000, 20000]; // ms until the next retry; the last value repeats

export class Strokes {
  constructor(events) {
    this.events = events; // changed(indices), replaced(), status(text, kind), failed(problem or null), conflict() -> "both" | "theirs"
    this.name = null;
    this.clear();
  }

  clear() {
    this.labels = null;
    this.past = [];
    this.future = [];
    this.dirty = new Map();
    this.saving = null;
    this.tried = 0;
    clearTimeout(this.timer);
  }

  async open(name) {
    const found = await readStrokes(name);
    this.clear();
    this.name = name;
    Object.assign(this, found);
    this.events.status("Saved", "");
    this.events.failed(null);
  }

  // Edits ----------------------------------------------------------------------------------------------------------
  begin(what = "strokes") { this.edit = { what, before: new Map(), after: new Map() }; }

  // Set one voxel within the current edit; returns whether it changed.
  set(index, value) {
    const old = this.labels[index];
    if (old === value) return false;
    if (!this.edit.before.has(index)) this.edit.before.set(index, old);
    this.edit.after.set(index, value);
    this.labels[index] = value;
    return true;
  }

  end() {
    const edit = this.edit;
    this.edit = null;
    if (!edit || !edit.after.size) return [];
    this.past.push(edit);
    if (this.past.length > MOST) this.past.shift();
    this.future = [];
    this.keep(edit.after, edit.what);
    return edit.after.keys();
  }

  // Cancel the current edit.
  cancel() {
    const edit = this.edit;
    this.edit = null;
    if (edit) this.write(edit.before);
  }

  undo() { this.travel(this.past, this.future, (e) => [e.after, e.before], "undo"); }
  redo() { this.travel(this.future, this.past, (e) => [e.before, e.after], "redo"); }

  // Voxels changed elsewhere since are left as they are.
  travel(from, to, sides, what) {
    if (this.edit || !from.length) return;
    const edit = from.pop();
    to.push(edit);
    const [expected, wanted] = sides(edit);
    const values = new Map();
    for (const [index, value] of wanted) if (this.labels[index] === expected.get(index)) values.set(index, value);
    this.write(values);
    this.keep(values, what);
  }

  write(values) {
    for (const [index, value] of values) this.labels[index] = value;
    this.events.changed([...values.keys()]);
  }

  // Saving ---------------------------------------------------------------------------------------------------------
  keep(values, what) {
    for (const [index, value] of values) this.dirty.set(index, value);
    this.what = what;
    this.events.status("Saving…", "");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), PAUSE);
  }

  get unsaved() { return this.dirty.size > 0 || this.saving !== null; }

  async flush() {
    clearTimeout(this.timer);
    this.failed = false;
    while (this.unsaved && !this.failed) await this.save();
  }

  save() {
    this.saving ??= this.send().finally(() => { this.saving = null; });
    return this.saving;
  }

  async send() {
    const name = this.name, sent = this.dirty;
    if (!sent.size) return;
    this.dirty = new Map();
    this.failed = false;
    try {
      const body = { version: this.version, runs: runs(sent), what: this.what, client };
      const answer = await post(caseUrl(name, "strokes"), body);
      if (this.name !== name) return;
      this.version = answer.version;
      if (this.tried) { this.tried = 0; this.events.failed(null); }
      if (this.dirty.size) this.timer = setTimeout(() => this.save(), PAUSE);
      else this.events.status("Saved", "");
    } catch (error) {
      if (this.name !== name) return;
      if (error.status === 404) { this.lose(error); return; }
      for (const [index, value] of sent) if (!this.dirty.has(index)) this.dirty.set(index, value);
      try {
        if (error.status !== 409) throw error;
        await this.settle();
      } catch (problem) { this.later(problem); }
    }
  }

  // The case was removed from the dataset: nothing can be saved, and leaving it must be possible.
  lose(problem) {
    this.clear();
    this.events.status("Not saved", "bad");
    this.events.failed({ message: problem.message, lost: true });
  }

  // Keep unsaved changes and retry later.
  later(problem) {
    this.failed = true;
    this.events.status("Not saved", "bad");
    this.events.failed(problem);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), AGAIN[Math.min(this.tried++, AGAIN.length - 1)]);
  }

  // Conflict with another save: the user chooses to keep both or to use theirs.
  async settle() {
    this.events.status("Changed elsewhere", "wait");
    const choice = await this.events.conflict();
    const found = await readStrokes(this.name);
    Object.assign(this, found);
    if (choice === "both") {
      for (const [index, value] of this.dirty) this.labels[index] = value;
      this.what = "merge";
      this.timer = setTimeout(() => this.save(), 0);
    } else {
      this.dirty = new Map();
      this.past = [];
      this.future = [];
      this.events.status("Saved", "");
    }
    this.events.replaced();
  }

  // Another window saved, and nothing is unsaved here: load its version.
  async follow(version) {
    if (version === this.version || this.unsaved || this.edit) return false;
    const name = this.name, found = await readStrokes(name);
    if (this.name !== name || this.unsaved || this.edit) return false;
    Object.assign(this, found);
    this.events.replaced();
    return true;
  }
}

// Runs [start, length, class or -1] of a map index -> value.
export function runs(values) {
  const found = [];
  let last = null;
  for (const index of Uint32Array.from(values.keys()).sort()) {
    const value = values.get(index) - 1;
    if (last && last[0] + last[1] === index && last[2] === value) last[1]++;
    else found.push(last = [index, 1, value]);
  }
  return found;
}
