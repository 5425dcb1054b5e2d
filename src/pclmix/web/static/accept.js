// Strokes without drawing: parts of the prediction taken over, and what lies between two drawn slices.

import { caseUrl, post } from "./api.js";
import { toast } from "./dialogs.js";

const SURE = 40; // of 255: doubt below which a voxel counts as certain

export class Accept {
  constructor(context) {
    this.context = context; // viewer, strokes, classes, edited(), editable(), name()
    this.maps = () => ({}); // of the review: prediction and unsure in native order
    this.load = () => {};
  }

  // Strokes that are there already are kept; `which` says whether voxel i is to be taken.
  take(from, to, which) {
    const { strokes, viewer } = this.context, { prediction } = this.maps();
    if (!this.context.editable()) return;
    if (!prediction) { toast("There is no prediction to accept yet."); return; }
    const changed = [];
    strokes.begin("accept");
    for (let i = from; i < to; i++)
      if (strokes.labels[i] === 0 && which(i) && strokes.set(i, prediction[i] + 1)) changed.push(i);
    strokes.end();
    viewer.layers.setVoxels(changed);
    this.context.edited(changed);
    toast(changed.length ? `${changed.length.toLocaleString()} pixels taken over. Undo brings them back.` : "Nothing new to take over here.");
  }

  get plane() { const [nx, ny] = this.context.viewer.grid.dims; return nx * ny; }

  slice() {
    if (!this.context.editable()) return;
    const z = this.context.viewer.slice;
    this.take(z * this.plane, (z + 1) * this.plane, () => true);
  }

  all() { if (this.context.editable()) this.take(0, this.context.viewer.grid.size, () => true); }

  async certain() {
    if (!this.context.editable()) return;
    if (!this.maps().unsure) await this.load("unsure");
    const { unsure } = this.maps(), z = this.context.viewer.slice;
    if (unsure) this.take(z * this.plane, (z + 1) * this.plane, (i) => unsure[i] < SURE);
  }

  // The connected part of the prediction at a voxel, within its slice.
  part(index) {
    const { prediction } = this.maps();
    if (!prediction || index < 0) return;
    const [nx, ny] = this.context.viewer.grid.dims, first = index - (index % this.plane);
    const label = prediction[index], seen = new Uint8Array(this.plane), queue = [index - first];
    seen[index - first] = 1;
    while (queue.length) {
      const i = queue.pop(), x = i % nx, y = Math.floor(i / nx);
      for (const [ok, j] of [[x > 0, i - 1], [x < nx - 1, i + 1], [y > 0, i - nx], [y < ny - 1, i + nx]])
        if (ok && !seen[j] && prediction[first + j] === label) { seen[j] = 1; queue.push(j); }
    }
    this.take(first, first + this.plane, (i) => seen[i - first]);
  }

  // Strokes for the slices between drawn ones, made by the server from the strokes as they are saved.
  async between() {
    const { strokes, viewer } = this.context, name = this.context.name();
    if (!this.context.editable()) return;
    try {
      await strokes.flush();
      const { version, runs, slices } = await post(caseUrl(name, "between"));
      if (!this.context.editable() || this.context.name() !== name || version !== strokes.version || strokes.unsaved) return;
      const changed = [];
      strokes.begin("between");
      for (const [start, length, label] of runs)
        for (let i = start; i < start + length; i++) if (strokes.labels[i] === 0 && strokes.set(i, label + 1)) changed.push(i);
      strokes.end();
      viewer.layers.setVoxels(changed);
      this.context.edited(changed);
      toast(changed.length ? `Filled in ${slices} slice${slices === 1 ? "" : "s"}. Look them through; Undo takes them back.`
        : "Nothing to fill in: draw a class on two slices with an empty one between them.");
    } catch (error) { toast(error.message, true); }
  }
}
