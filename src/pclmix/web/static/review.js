// Looking at a prediction: overlays, where to draw next, taking over what is right.

import { bytes, caseUrl, get } from "./api.js";
import { make, toast } from "./dialogs.js";
import { read } from "./viewer.js";

const SURE = 40; // of 255: doubt below which a voxel counts as certain

export class Review {
  constructor(box, context) {
    this.context = context; // viewer, strokes, classes, go(z), edited(), slice(), editable()
    this.box = box;
    this.name = null;
    this.known = [];
    this.places = [];
    this.at = -1;
    this.on = { prediction: true, unsure: false, difference: false };
    this.strength = { unsure: 0.6, prediction: context.viewer.strength.prediction, difference: context.viewer.strength.difference };
    this.render();
  }

  async open(name, known) {
    this.name = name;
    this.known = known;
    this.maps = {}; // prediction, difference, unsure: native order
    this.places = [];
    this.at = -1;
    this.mark(null);
    this.context.viewer.setMap("prediction", null);
    this.context.viewer.setMap("difference", null);
    await this.context.viewer.setDoubt(null);
    this.render();
    if (!known.length) return;
    await Promise.all([this.load("prediction"), this.on.unsure && this.load("unsure"), this.on.difference && this.load("difference"), this.suggest()]);
  }

  // The case is left: what is still on its way for it is dropped, and nothing of it can be taken over.
  close() {
    this.name = null;
    this.known = [];
    this.maps = {};
    this.places = [];
    this.mark(null);
  }

  async load(kind) {
    const { name } = this, { viewer } = this.context;
    if (kind === "difference" && this.known.length < 2) return;
    try {
      const buffer = await bytes(`${caseUrl(name, kind)}?of=${this.known[0].time}`);
      const map = (await read(buffer, kind)).img;
      if (this.name !== name) return;
      this.maps[kind] = map;
      if (kind === "unsure") { if (this.on.unsure) await viewer.setDoubt(buffer, this.strength.unsure); }
      else viewer.setMap(kind, this.on[kind] ? map : null);
    } catch (error) { toast(error.message, true); }
  }

  async suggest() {
    const name = this.name;
    if (!this.known.length) return;
    try {
      const places = await get(caseUrl(name, "next"));
      if (this.name === name) { this.places = places; this.render(); }
    } catch (error) { toast(error.message, true); }
  }

  async toggle(kind, value = !this.on[kind]) {
    this.on[kind] = value;
    if (this.known.length) {
      if (kind === "unsure" && !value) await this.context.viewer.setDoubt(null);
      else if (kind === "unsure" || (value && !this.maps[kind])) await this.load(kind);
      else this.context.viewer.setMap(kind, value ? this.maps[kind] : null);
    }
    this.render();
  }

  strengthen(kind, value) {
    this.strength[kind] = value;
    if (kind === "unsure") this.context.viewer.setDoubtStrength(value);
    else this.context.viewer.setStrength(kind, value);
  }

  // Where next -----------------------------------------------------------------------------------------------------
  goTo(index) {
    const place = this.places[index];
    if (!place) return;
    this.at = index;
    this.context.go(place.z);
    this.mark(place);
    this.render();
  }

  next() { if (this.places.length) this.goTo((this.at + 1) % this.places.length); }

  mark(place) { this.place = place; this.position(); }

  position() {
    const mark = document.getElementById("place"), { viewer } = this.context;
    const shown = this.place && viewer.grid && viewer.slice === this.place.z;
    mark.hidden = !shown;
    if (!shown) return;
    const at = viewer.screen(this.place.x, this.place.y);
    if (at) mark.style.transform = `translate(${at.x}px, ${at.y}px)`;
  }

  // Taking over ----------------------------------------------------------------------------------------------------
  // Strokes that are there already are kept; `which` says whether voxel i is to be taken.
  accept(from, to, which) {
    const { strokes, viewer } = this.context, { prediction } = this.maps ?? {};
    if (!this.context.editable()) return;
    if (!prediction) { toast("There is no prediction to accept yet."); return; }
    const changed = [], values = [];
    strokes.begin("accept");
    for (let i = from; i < to; i++)
      if (strokes.labels[i] === 0 && which(i) && strokes.set(i, prediction[i] + 1)) { changed.push(i); values.push(prediction[i] + 1); }
    strokes.end();
    viewer.setVoxels(changed, values);
    this.context.edited(changed);
    toast(changed.length ? `${changed.length.toLocaleString()} pixels taken over. Undo brings them back.` : "Nothing new to take over here.");
  }

  acceptSlice() {
    if (!this.context.editable()) return;
    const [nx, ny] = this.context.viewer.grid.dims, z = this.context.slice();
    this.accept(z * nx * ny, (z + 1) * nx * ny, () => true);
  }

  acceptAll() { this.accept(0, this.context.viewer.grid.size, () => true); }

  async acceptCertain() {
    if (!this.context.editable()) return;
    if (!this.maps?.unsure) await this.load("unsure");
    const { unsure } = this.maps, [nx, ny] = this.context.viewer.grid.dims, z = this.context.slice();
    if (unsure) this.accept(z * nx * ny, (z + 1) * nx * ny, (i) => unsure[i] < SURE);
  }

  // The connected part of the prediction at a voxel, within its slice.
  acceptPart(index) {
    const { prediction } = this.maps ?? {};
    if (!prediction || index < 0) return;
    const [nx, ny] = this.context.viewer.grid.dims, plane = nx * ny, first = index - (index % plane);
    const label = prediction[index], seen = new Set([index]), queue = [index];
    while (queue.length) {
      const i = queue.pop(), x = (i - first) % nx, y = Math.floor((i - first) / nx);
      for (const [ok, j] of [[x > 0, i - 1], [x < nx - 1, i + 1], [y > 0, i - nx], [y < ny - 1, i + nx]])
        if (ok && !seen.has(j) && prediction[j] === label) { seen.add(j); queue.push(j); }
    }
    this.accept(first, first + plane, (i) => seen.has(i));
  }

  render() {
    if (!this.known.length) {
      this.box.replaceChildren(make("p", { className: "faint" }, "Nothing predicted for this case yet."));
      return;
    }
    const { quality, agreement } = this.known[0], percent = (v) => `${Math.round(v * 100)} %`;
    const figures = make("div", { className: "figures" },
      make("div", { title: "The model's own estimate of the overlap with a perfect mask; often too hopeful" }, make("b", {}, `≈ ${percent(quality)}`), make("span", {}, "expected overlap")),
      agreement === null ? null : make("div", { title: "Share of the pixels you drew that the prediction agrees with" }, make("b", {}, percent(agreement)), make("span", {}, "agrees with strokes")));
    const layer = (kind, text, enabled = true) => {
      const tick = make("input", { type: "checkbox", id: `show-${kind}`, checked: this.on[kind], disabled: !enabled, onchange: (e) => this.toggle(kind, e.target.checked) });
      const range = make("input", { type: "range", min: 5, max: 100, value: this.strength[kind] * 100, disabled: !enabled,
        oninput: (e) => this.strengthen(kind, e.target.value / 100) });
      range.setAttribute("aria-label", `${text}: strength`);
      return make("label", {}, make("span", { className: "tick" }, tick, text), range);
    };
    const places = this.places.slice(0, 6).map((p, i) => make("li", {}, make("button", { onclick: () => this.goTo(i), className: i === this.at ? "main" : "" },
      make("span", {}, `Slice ${p.z + 1}`), make("span", {}, p.classes.map((k) => this.context.classes[k].name).join(" or ") + (p.classes.length > 1 ? "?" : "")))));
    this.box.replaceChildren(make("div", { className: "fields" },
      figures,
      layer("prediction", "Prediction"), layer("unsure", "Doubt"), layer("difference", "Changes", this.known.length > 1),
      places.length ? make("h3", {}, "Where a stroke helps most") : null,
      places.length ? make("ol", { className: "places" }, ...places) : null,
      make("h3", {}, "Take over as strokes"),
      make("p", { className: "faint" }, "Your own strokes are kept. Shift + click takes one part."),
      make("div", { className: "row" },
        make("button", { id: "accept-certain", onclick: () => this.acceptCertain() }, "What is certain"),
        make("button", { id: "accept-slice", onclick: () => this.acceptSlice() }, "This slice"),
        make("button", { id: "accept-all", onclick: () => this.acceptAll() }, "Whole case"))));
  }
}
