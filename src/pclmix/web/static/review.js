// The panel "Prediction": overlays, figures, suggestions where to draw next, accepting regions.

import { bytes, caseUrl, get } from "./api.js";
import { make, toast } from "./dialogs.js";
import { read } from "./viewer.js";

const SIDES = [["left", "right"], ["posterior", "anterior"], ["inferior", "superior"]]; // low and high ends of RAS axes
const EDGES = [["left", "right"], ["upper", "lower"]]; // of the screen, across and down
const NEAR_CENTRE = 1 / 8; // of the image's size

export class Review {
  constructor(box, context, accept) {
    Object.assign(this, { box, context, accept }); // context: viewer, strokes, classes, picture, go(voxel)
    this.name = null;
    this.known = [];
    this.places = [];
    this.at = -1;
    this.on = { prediction: true, unsure: false, difference: false };
    const { prediction, difference } = context.viewer.layers.strength;
    this.strength = { unsure: 0.4, prediction, difference };
    this.render();
  }

  async open(name, known) {
    const { layers } = this.context.viewer;
    this.name = name;
    this.known = known;
    this.maps = {}; // prediction, difference, unsure: native order
    this.places = [];
    this.at = -1;
    this.mark(null);
    layers.setMap("prediction", null);
    layers.setMap("difference", null);
    await layers.setDoubt(null);
    this.render();
    if (!known.length) return;
    await Promise.all([this.load("prediction"), this.on.unsure && this.load("unsure"), this.on.difference && this.load("difference"), this.suggest()]);
  }

  // Another case is loading: drop pending responses and disable accepting.
  close() {
    this.name = null;
    this.known = [];
    this.maps = {};
    this.places = [];
    this.mark(null);
  }

  async load(kind) {
    const { name } = this, { layers } = this.context.viewer;
    if (kind === "difference" && this.known.length < 2) return;
    try {
      const buffer = await bytes(`${caseUrl(name, kind)}?of=${this.known[0].time}`);
      const map = (await read(buffer, kind)).img;
      if (this.name !== name) return;
      this.maps[kind] = map;
      if (kind === "unsure") { if (this.on.unsure) await layers.setDoubt(buffer, map, this.strength.unsure); }
      else layers.setMap(kind, this.on[kind] ? map : null);
    } catch (error) { toast(error.message, true); }
  }

  async suggest() {
    const name = this.name;
    if (!this.known.length) return;
    try {
      const places = await get(caseUrl(name, "next"));
      if (this.name === name) { this.places = places; this.at = -1; this.render(); }
    } catch (error) { toast(error.message, true); }
  }

  async toggle(kind, value = !this.on[kind]) {
    this.on[kind] = value;
    if (this.known.length) {
      const { layers } = this.context.viewer;
      if (kind === "unsure" && !value) await layers.setDoubt(null);
      else if (kind === "unsure" || (value && !this.maps[kind])) await this.load(kind);
      else layers.setMap(kind, value ? this.maps[kind] : null);
    }
    this.render();
  }

  strengthen(kind, value) {
    this.strength[kind] = value;
    this.context.viewer.layers.setStrength(kind === "unsure" ? "doubt" : kind, value);
  }

  // Where next -----------------------------------------------------------------------------------------------------
  goTo(index) {
    const place = this.places[index];
    if (!place) return;
    this.at = index;
    this.place = place;
    this.context.go([place.x, place.y, place.z]);
    this.render();
  }

  next() { if (this.places.length) this.goTo((this.at + 1) % this.places.length); }

  mark(place) { this.place = place; this.position(); }

  position() {
    const mark = document.getElementById("place"), { viewer } = this.context;
    const plane = this.place && viewer.tiles[0], shown = plane && viewer.slice === this.place.z;
    mark.hidden = !shown;
    if (!shown) return;
    const [x, y] = plane.screen([this.place.x, this.place.y, this.place.z]);
    mark.hidden = !plane.contains(x, y);
    mark.style.transform = `translate(${x}px, ${y}px)`;
  }

  // Where a place is in its slice: towards which sides of the patient, or of the picture.
  side({ x, y, z }) {
    const { viewer } = this.context, { grid } = viewer, words = [], axes = viewer.tiles[0]?.axes ?? [];
    for (const { axis, across, scale } of [...axes].sort((a, b) => b.across - a.across)) {
      const share = (grid.along(axis, [x, y, z]) + 0.5) / grid.ras[axis] - 0.5, end = viewer.oriented && !this.context.picture ? SIDES[axis] : EDGES[across];
      if (Math.abs(share) > NEAR_CENTRE) words.push(end[Number((end === EDGES[across] ? share * scale : share) > 0)]);
    }
    return words.join(" ") || "centre";
  }

  // The reason for a suggestion in a few words.
  reason({ pixels, stroke, slices }) {
    const { viewer } = this.context, [p, q] = viewer.grid.plane(), square = pixels * viewer.spacing[p] * viewer.spacing[q];
    const spaced = !this.context.picture, area = !spaced ? `${pixels.toLocaleString()} pixels` : square >= 100 ? `${(square / 100).toFixed(1)} cm²` : `${square >= 10 ? Math.round(square) : Number(square.toPrecision(2))} mm²`;
    const far = spaced ? `${Math.round((stroke ?? 0) * Math.min(viewer.spacing[p], viewer.spacing[q]))} mm` : `${stroke} pixels`;
    const where = slices === null ? "no strokes yet" : slices > 0 ? `no strokes within ${slices} slice${slices > 1 ? "s" : ""}` : `nearest stroke ${far} away`;
    return `${pixels ? `uncertain over ${area}` : "slightly uncertain"}; ${where}`;
  }

  suggestion(place, i) {
    const { classes, viewer } = this.context, names = place.classes.map((k) => classes[k].name).join(" or ");
    const where = viewer.grid.slices > 1 ? `Slice ${place.z + 1}: ` : `Place ${i + 1}: `;
    const button = make("button", { onclick: () => this.goTo(i) },
      make("span", {}, `${where}${names}${place.classes.length > 1 ? "?" : ""}`), make("small", {}, `${this.side(place)}; ${this.reason(place)}`));
    button.setAttribute("aria-current", String(i === this.at));
    return make("li", {}, button);
  }

  render() {
    if (!this.known.length) {
      this.box.replaceChildren(make("p", { className: "faint" }, "No prediction for this case yet."));
      return;
    }
    const { certainty, expected_dice: dice, agreement } = this.known[0], percent = (v) => `${Math.round(v * 100)} %`;
    const figures = make("div", { className: "figures" },
      make("div", { title: "1 - mean entropy / ln K over the pixels predicted as foreground" }, make("b", {}, percent(certainty)), make("span", {}, "certainty")),
      make("div", { title: "Dice estimated from the probabilities of the model; too high if the model is overconfident" }, make("b", {}, `≈ ${percent(dice)}`), make("span", {}, "expected Dice")),
      agreement === null ? null : make("div", { title: "Fraction of the drawn pixels that the prediction has right" }, make("b", {}, percent(agreement)), make("span", {}, "agrees with strokes")));
    const layer = (kind, text, enabled = true) => {
      const tick = make("input", { type: "checkbox", id: `show-${kind}`, checked: this.on[kind], disabled: !enabled, onchange: (e) => this.toggle(kind, e.target.checked) });
      const range = make("input", { type: "range", min: 5, max: 100, value: this.strength[kind] * 100, disabled: !enabled,
        oninput: (e) => this.strengthen(kind, e.target.value / 100) });
      range.setAttribute("aria-label", `${text}: opacity`);
      return make("label", {}, make("span", { className: "tick" }, tick, text), range);
    };
    const { accept } = this, places = this.places.map((place, i) => this.suggestion(place, i));
    const focused = this.box.contains(document.activeElement) ? [...this.box.querySelectorAll("button, input")].indexOf(document.activeElement) : -1;
    this.box.replaceChildren(make("div", { className: "fields" },
      figures,
      layer("prediction", "Prediction"), layer("unsure", "Uncertainty"), layer("difference", "Changes", this.known.length > 1),
      places.length ? make("h2", {}, "Where a stroke helps most") : null,
      places.length ? make("ol", { className: "places" }, ...places) : null,
      make("h2", {}, "Accept as strokes"),
      make("p", { className: "faint" }, "Existing strokes are kept. Shift + click accepts one region."),
      make("div", { className: "row" },
        make("button", { id: "accept-certain", onclick: () => accept.certain() }, "Certain pixels"),
        make("button", { id: "accept-slice", onclick: () => accept.slice() }, "This slice"),
        make("button", { id: "accept-all", onclick: () => accept.all() }, "Whole case"))));
    if (focused >= 0) this.box.querySelectorAll("button, input")[focused]?.focus();
  }
}
