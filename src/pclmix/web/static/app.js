// The page: creates the components and connects them.

import { bytes, caseUrl, client, get, listen } from "./api.js";
import { Accept } from "./accept.js";
import { CaseList } from "./cases.js";
import { alarm, conflict, download, help, history, make, toast } from "./dialogs.js";
import { asked, first, remember, takeOver } from "./first.js";
import { Hud } from "./hud.js";
import { keys } from "./keys.js";
import { Learn } from "./learn.js";
import { Pointer } from "./pointer.js";
import { Review } from "./review.js";
import { SliceStrip } from "./slices.js";
import { Strokes } from "./strokes.js";
import { receive } from "./upload.js";
import { View } from "./view.js";
import { Viewer } from "./viewer.js";

const $ = (id) => document.getElementById(id);
const ERASER = -1, LOOK = -2; // tools beside the classes

class Workbench {
  async start() {
    this.viewer = new Viewer($("canvas"));
    const asking = get("dataset"); // requested early: starting the viewer blocks the page
    await this.viewer.start();
    this.dataset = await asking;
    const found = await first, names = this.dataset.cases.map((c) => c.name);
    const opened = names.includes(found?.name) ? found.name : names[0] ?? null;
    if (opened === found?.name) this.fetched = found;
    document.title = `${this.dataset.name} · workbench`;
    $("dataset-name").textContent = $("dataset-name").title = this.dataset.name;
    $("dataset-name").title += ` (${this.dataset.folder})`;
    const { classes } = this.dataset;
    this.viewer.layers.classes = classes;
    this.strokes = new Strokes({
      changed: (indices) => { this.viewer.layers.setVoxels(indices); this.edited(indices); },
      replaced: () => { this.viewer.layers.setStrokes(this.strokes.labels); this.measure(); },
      status: (text, kind) => { $("saved").textContent = text; $("saved").className = kind; if (text === "Saved") this.afterSave(); },
      failed: (problem) => alarm(problem, () => this.strokes.flush()),
      conflict,
    });
    this.strip = new SliceStrip($("slices"), classes, (z) => this.go(z));
    this.list = new CaseList(this.dataset, (name) => this.open(name));
    const shared = {
      viewer: this.viewer, strokes: this.strokes, classes, picture: this.dataset.picture, edited: (indices) => this.edited(indices), editable: () => this.editable,
      go: (voxel) => { this.viewer.centre(voxel, 2); this.placed(); }, name: () => this.name,
    };
    this.accept = new Accept(shared);
    this.review = new Review($("review"), shared, this.accept);
    this.accept.maps = () => this.review.maps ?? {};
    this.accept.load = (kind) => this.review.load(kind);
    this.hud = new Hud($("hud"), $("readout"), this.viewer, { picture: this.dataset.picture, classes, crosshair: () => this.label === LOOK });
    this.view = new View($("look"), this.viewer, this.dataset, { reload: () => this.open(this.name, this.viewer.slice), changed: () => this.placed() });
    this.viewer.moved = () => { this.hud.draw(); this.review.position(); };
    this.pointer = new Pointer($("canvas"), $("brush"), this.viewer, {
      drawing: () => this.editable,
      looking: () => this.label === LOOK,
      colour: () => (this.label < 0 ? "#ffffff" : classes[this.label].colour),
      begin: (erasing) => { this.value = erasing ? 0 : this.label + 1; this.strokes.begin(); },
      paint: (voxels) => this.paint(voxels),
      end: (undone) => { if (undone) this.strokes.cancel(); else this.edited([...this.strokes.end()]); },
      window: (dx, dy) => this.view.drag(dx, dy),
      take: (index) => this.takePart(index),
      look: (index) => { this.viewer.look(this.viewer.grid.voxel(index)); this.placed(); },
      scroll: (depth, by) => { this.viewer.scroll(depth, by); this.placed(); },
      hover: (at) => this.hud.read(at),
    });
    this.chooser(classes);
    this.controls();
    keys(this);
    await this.open(opened, asked.slice);
    this.learn = new Learn($("learn"), {
      picture: this.dataset.picture, current: () => this.name, all: () => this.list.cases.map((c) => c.name), flush: () => this.strokes.flush(),
      predicted: (cases) => this.predicted(cases),
    });
    this.list.setProgress(await get("progress"));
    listen({
      job: (job) => this.learn.show(job),
      strokes: (event) => this.changedElsewhere(event),
      cases: () => this.reloadCases(),
    });
  }

  // Cases ----------------------------------------------------------------------------------------------------------
  image(name) { return bytes(caseUrl(name, `image/${this.view.channel}`)); }

  // Whether strokes, image and prediction belong to the open case; false while another case is loading.
  get editable() { return Boolean(this.name && this.strokes.labels); }

  async open(name, slice) {
    const begun = performance.now(), turn = (this.turn = (this.turn ?? 0) + 1), before = this.name ?? this.left;
    this.strokes.end(); // a stroke being drawn belongs to the previous case
    this.left = before;
    this.name = null;
    if (this.strokes.name) await this.strokes.flush();
    if (turn !== this.turn) return;
    if (this.strokes.unsaved) {
      this.name = before;
      toast("The last strokes are not saved yet. Please wait before opening another case.", true);
      return;
    }
    this.left = null;
    this.review.close();
    $("empty").hidden = Boolean(name);
    this.showCases(false);
    this.list.select(name);
    if (!name) { this.buttons(); return; }
    this.strokes.clear();
    this.strokes.name = null;
    try {
      const early = this.fetched?.name === name ? this.fetched.image : null;
      this.fetched = null;
      const [image] = await Promise.all([early ?? this.image(name), this.strokes.open(name)]);
      if (turn !== this.turn) return;
      await this.viewer.load(image, slice);
      if (this.strokes.shape.join() !== [...this.viewer.grid.dims].reverse().join())
        throw new Error(`The strokes of ${name} are ${this.strokes.shape.join(" × ")} voxels, its image is not; run pclmix check.`);
    } catch (error) {
      if (turn === this.turn) { this.strokes.clear(); toast(error.message ?? String(error), true); }
      takeOver();
      return;
    }
    if (turn !== this.turn) return;
    this.name = name;
    remember(name);
    this.view.opened();
    this.viewer.layers.setStrokes(this.strokes.labels);
    this.measure();
    this.pen(this.pointer.size);
    this.placed();
    takeOver();
    document.body.dataset.ready = name;
    requestAnimationFrame(() => performance.measure("case", { start: begun })); // read by benchmarks/web.py
    await this.showPrediction();
  }

  async showPrediction() {
    const known = this.list.byName.get(this.name)?.predictions ?? [];
    this.strip.unsure = known[0]?.unsure ?? null;
    this.strip.render();
    await this.review.open(this.name, known);
    document.body.dataset.predicted = known[0]?.run ?? "";
  }

  // Reload the list; `added` is a new case to open.
  async reloadCases(added = null) {
    const found = await get("dataset"), kind = ({ picture, coloured, channels }) => JSON.stringify([picture, coloured, channels]);
    if (kind(found) !== kind(this.dataset)) { // the first image has set the kind of an empty dataset
      await this.strokes.flush();
      location.replace(`?case=${encodeURIComponent(added ?? found.cases[0]?.name ?? "")}`);
      return;
    }
    this.list.replace(found.cases);
    this.list.setProgress(await get("progress"));
    this.learn?.enable(); // not created yet if the drop came while the first case was loading
    const wanted = added ?? (this.list.current ? null : found.cases[0]?.name);
    if (wanted) await this.open(wanted);
  }

  async predicted(cases) {
    const found = await get("dataset");
    this.list.replace(found.cases);
    this.list.render();
    if (cases.includes(this.name)) await this.showPrediction();
  }

  async changedElsewhere(event) {
    if (event.client === client) return;
    if (event.case === this.name && await this.strokes.follow(event.version)) toast("Strokes updated from another window or program.");
    this.list.setProgress(await get(`progress?case=${encodeURIComponent(event.case)}`));
  }

  async afterSave() {
    const name = this.strokes.name;
    if (!name || !this.learn) return;
    this.list.setProgress(await get(`progress?case=${encodeURIComponent(name)}`));
    await this.review.suggest();
  }

  // Slices and strokes ---------------------------------------------------------------------------------------------
  go(z) {
    if (!this.viewer.grid) return;
    this.viewer.show(z);
    this.placed();
  }

  // Update everything that depends on the slice or view shown.
  placed() {
    const { slice, grid } = this.viewer, many = grid.slices > 1;
    this.strip.show(slice);
    $("corner").textContent = many && !(this.viewer.three && this.viewer.hasDepth) ? `Slice ${slice + 1} of ${grid.slices}` : "";
    clearTimeout(this.noting); // browsers limit the rate of history changes
    this.noting = setTimeout(() => {
      const at = many ? `&slice=${slice + 1}` : "";
      if (this.name) window.history.replaceState(null, "", `?case=${encodeURIComponent(this.name)}${at}`);
    }, 200);
  }

  measure() {
    const [nx, ny, nz] = this.viewer.grid.dims;
    this.strip.measure(this.strokes.labels, nx * ny, nz);
    this.buttons();
  }

  // An edit has ended: update only its slices and the one shown.
  edited(indices) {
    if (!this.strokes.labels) return;
    const [nx, ny] = this.viewer.grid.dims, slices = new Set([this.viewer.slice]);
    for (const index of indices) slices.add(Math.floor(index / (nx * ny)));
    for (const z of slices) this.strip.update(this.strokes.labels, z);
    this.strip.render();
    this.viewer.layers.settle(indices);
    this.buttons();
  }

  buttons() {
    $("undo").disabled = !this.strokes.past.length;
    $("redo").disabled = !this.strokes.future.length;
    $("between").hidden = !this.viewer.grid || this.viewer.grid.slices < 3;
  }

  paint(voxels) {
    if (!this.editable) return;
    const { layers } = this.viewer;
    for (const index of voxels) if (this.strokes.set(index, this.value)) layers.setVoxel(index);
    layers.refresh();
  }

  clearSlice() {
    if (!this.editable) return;
    const [nx, ny] = this.viewer.grid.dims, from = this.viewer.slice * nx * ny;
    this.strokes.begin("clear");
    for (let i = from; i < from + nx * ny; i++) if (this.strokes.set(i, 0)) this.viewer.layers.setVoxel(i);
    this.edited([...this.strokes.end()]);
    this.viewer.layers.refresh();
  }

  undo() { if (this.editable) { this.strokes.undo(); this.buttons(); } }
  redo() { if (this.editable) { this.strokes.redo(); this.buttons(); } }

  // Controls -------------------------------------------------------------------------------------------------------
  chooser(classes) {
    const entries = [
      ...classes.map((c, k) => [k, c.name, c.colour, String(k)]).slice(1), [0, "Background", classes[0].colour, "0"],
      [ERASER, "Eraser", "eraser", "E"], [LOOK, "Crosshair", "cross", "X"],
    ];
    $("classes").replaceChildren(...entries.map(([k, name, colour, key]) => {
      const dot = make("i", { className: k < 0 ? colour : "" });
      if (k >= 0) dot.style.background = colour;
      const button = make("button", { dataset: { label: k }, onclick: () => this.choose(k) }, dot, name, key.length === 1 ? make("kbd", {}, key) : null);
      button.setAttribute("role", "radio");
      return button;
    }));
    this.choose(classes.length > 1 ? 1 : 0);
  }

  choose(label) {
    this.label = label;
    for (const button of $("classes").children) button.setAttribute("aria-checked", String(Number(button.dataset.label) === label));
    $("canvas").classList.toggle("looking", label === LOOK);
    this.hud.draw();
  }

  // Pen size in steps; the display is in voxels, of which a large picture has several per step.
  pen(size) {
    const value = Math.max(1, Math.min(21, size));
    this.pointer.size = value;
    $("pen").value = value;
    $("pen-size").textContent = value * this.viewer.layers.unit;
  }

  showCases(open) {
    $("cases-panel").classList.toggle("open", open);
    $("show-cases").setAttribute("aria-expanded", String(open));
  }

  // Close the list of cases where it lies over the page; returns whether it was open.
  closeCases() {
    if (!$("cases-panel").classList.contains("open")) return false;
    this.showCases(false);
    $("show-cases").focus();
    return true;
  }

  controls() {
    $("pen").oninput = () => this.pen(Number($("pen").value));
    $("undo").onclick = () => this.undo();
    $("redo").onclick = () => this.redo();
    $("clear").onclick = () => this.clearSlice();
    $("between").onclick = () => this.accept.between();
    $("planes").onclick = () => this.view.togglePlanes();
    $("help").onclick = help;
    $("export").onclick = download;
    $("history").onclick = () => { if (this.name) history(this.strokes, () => this.reopenStrokes()).catch((e) => toast(e.message, true)); };
    $("show-cases").onclick = () => this.showCases(!$("cases-panel").classList.contains("open"));
    $("stage").addEventListener("pointerdown", () => this.showCases(false));
    receive(this.dataset.takes, (text) => { $("saved").textContent = text; }, (added) => this.reloadCases(added));
    window.addEventListener("beforeunload", (e) => { if (this.strokes.unsaved) e.preventDefault(); });
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.strokes.flush(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.strip.render());
  }

  takePart(index) {
    if (this.review.maps?.prediction && this.review.on.prediction) this.accept.part(index);
    else toast("Show the prediction first: Shift + click accepts one region of it.");
  }

  async reopenStrokes() {
    await this.strokes.open(this.name);
    this.viewer.layers.setStrokes(this.strokes.labels);
    this.measure();
  }
}

const workbench = new Workbench();
workbench.start().catch((error) => toast(error.message ?? String(error), true));
