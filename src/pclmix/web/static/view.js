// The panel "View": window and level with presets, channel, planes, left-right convention, opacity of strokes.

import { make } from "./dialogs.js";
import { keep, kept } from "./first.js";

const COLOUR = "colour"; // all channels of a colour picture

export class View {
  constructor(box, viewer, dataset, context) {
    Object.assign(this, { viewer, dataset, context }); // context: reload(), changed()
    const { channels, coloured, picture } = dataset;
    this.channel = coloured ? COLOUR : 0;
    this.viewer.three = kept("planes") === "3" && !picture;
    const number = (id) => make("input", { id, type: "number", step: "any" });
    const range = (id) => make("input", { id: `${id}-range`, type: "range", step: "any", tabIndex: 0 });
    this.preset = make("select", { id: "preset", onchange: () => this.choose(this.preset.value) });
    this.level = number("level");
    this.width = number("width");
    this.levelRange = range("level");
    this.widthRange = range("width");
    this.levelRange.setAttribute("aria-label", "Level");
    this.widthRange.setAttribute("aria-label", "Width");
    for (const input of [this.level, this.width]) input.onchange = () => this.set(Number(this.level.value), Number(this.width.value));
    for (const input of [this.levelRange, this.widthRange]) input.oninput = () => this.set(Number(this.levelRange.value), Number(this.widthRange.value));
    this.pick = make("select", { id: "channel", onchange: () => { this.channel = this.pick.value; context.reload(); } });
    this.pick.replaceChildren(...(coloured ? [new Option("Colour", COLOUR)] : []), ...channels.map((name, i) => new Option(name, i)));
    this.mirror = make("input", { id: "mirror", type: "checkbox", checked: true, onchange: () => { this.sides(); } });
    this.strokes = make("input", { id: "stroke-opacity", type: "range", min: 0, max: 100, value: 90 });
    this.strokes.oninput = () => viewer.layers.setStrength("stroke", Number(this.strokes.value) / 100);
    this.side = make("label", { className: "check", hidden: true }, this.mirror, "Patient's left on the right");
    box.append(
      make("label", { hidden: channels.length < 2 }, "Image", this.pick),
      make("label", {}, "Window", this.preset),
      make("label", { className: "number" }, "Level", this.levelRange, this.level),
      make("label", { className: "number" }, "Width", this.widthRange, this.width),
      make("label", {}, "Strokes", this.strokes),
      this.side,
      make("div", { className: "row" },
        make("button", { id: "fit", title: "Fit (F)", onclick: () => viewer.fit() }, "Fit"),
        make("button", { id: "reset-window", title: "Automatic window (R)", onclick: () => this.reset() }, "Reset window")));
  }

  get modality() { return this.channel === COLOUR ? COLOUR : this.dataset.channels[this.channel]; }

  // A new image is shown. The preset chosen for its modality is applied again.
  opened() {
    const { viewer } = this, { intensity } = viewer;
    this.presets = intensity.presets(this.modality);
    this.preset.replaceChildren(...this.presets.map(([name]) => new Option(name, name)), new Option("Custom", "Custom", false, false));
    const [low, high] = intensity.full, span = high - low || 1;
    Object.assign(this.levelRange, { min: low, max: high });
    Object.assign(this.widthRange, { min: span / 500, max: Math.max(span, intensity.width) });
    this.side.hidden = this.dataset.picture || !viewer.oriented;
    this.sides();
    const planes = document.getElementById("planes");
    planes.hidden = this.dataset.picture || !viewer.hasDepth;
    planes.setAttribute("aria-pressed", String(viewer.three));
    document.getElementById("view").classList.toggle("with-slices", viewer.grid.slices > 1);
    document.getElementById("slices").hidden = viewer.grid.slices < 2;
    const wanted = kept(`window.${this.modality}`);
    if (wanted && wanted !== "Automatic" && this.presets.some(([name]) => name === wanted)) this.choose(wanted);
    else this.show("Automatic");
    viewer.arrange();
  }

  sides() { this.viewer.radiological = this.mirror.checked && this.viewer.oriented && !this.dataset.picture; }

  togglePlanes() {
    if (this.dataset.picture || !this.viewer.hasDepth) return;
    const three = !this.viewer.three;
    keep("planes", three ? "3" : "1");
    document.getElementById("planes").setAttribute("aria-pressed", String(three));
    this.viewer.planes = three;
    this.context.changed();
  }

  choose(name) {
    const found = this.presets.find(([preset]) => preset === name);
    if (!found) return;
    keep(`window.${this.modality}`, name);
    this.viewer.intensity.set(found[1], found[2]);
    this.show(name);
  }

  set(level, width) {
    if (!(width > 0)) { this.show(this.preset.value); return; }
    this.viewer.intensity.set(level, width);
    this.show("Custom");
  }

  // Drag with the right button: up is brighter, right is less contrast.
  drag(dx, dy) {
    const { level, width } = this.viewer.intensity;
    this.set(level + (dy * width) / 300, width * Math.exp(dx / 200));
  }

  reset() { this.choose("Automatic"); }

  show(name) {
    const { level, width } = this.viewer.intensity, plain = (v) => String(Number(v.toPrecision(4)));
    this.preset.value = name;
    [this.level.value, this.width.value, this.levelRange.value, this.widthRange.value] = [plain(level), plain(width), level, width];
  }
}
