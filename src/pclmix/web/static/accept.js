// Strokes without drawing: accepted parts of the prediction, and interpolation between drawn slices.

import { caseUrl, post } from "./api.js";
import { toast } from "./dialogs.js";

const SURE = 40; // of 255: entropy below which a voxel counts as certain

export class Accept {
  constructor(context) {
    this.context = context; // viewer, strokes, classes, edited(), editable(), name()
    this.maps = () => ({}); // set by the page: prediction and entropy of the review, in native order
    this.load = () => {};
  }

  // Accept the prediction for voxels [from, to) where `which(i)` holds. Existing strokes are kept.
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
    toast(changed.length ? `${changed.length.toLocaleString()} pixels accepted. Undo removes them.` : "Nothing new to accept here.");
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

  // Accept the connected region of the prediction at a voxel, within its slice.
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

  // Interpolate strokes between drawn slices. The server computes them from the saved strokes.
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
      toast(changed.length ? `Interpolated ${slices} slice${slices === 1 ? "" : "s"}. Please check them; Undo removes them.`
        : "Nothing to interpolate: draw a class on two slices with empty slices between them.");
    } catch (error) { toast(error.message, true); }
  }
}
