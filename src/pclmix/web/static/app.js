// The page: parts made and tied together.

import { bytes, caseUrl, client, get, listen } from "./api.js";
import { CaseList } from "./cases.js";
import { conflict, download, help, history, make, toast } from "./dialogs.js";
import { first, remember, takeOver } from "./first.js";
import { keys } from "./keys.js";
import { Learn } from "./learn.js";
import { Pointer } from "./pointer.js";
import { Review } from "./review.js";
import { SliceStrip } from "./slices.js";
import { Strokes } from "./strokes.js";
import { receive } from "./upload.js";
import { Viewer } from "./viewer.js";

const $ = (id) => document.getElementById(id);
const ERASER = -1;

class Workbench {
  async start() {
    this.viewer = new Viewer($("canvas"));
    const asking = get("dataset"); // first: starting the viewer keeps the page busy
    await this.viewer.start();
    this.dataset = await asking;
    const found = await first, names = this.dataset.cases.map((c) => c.name);
    const opened = names.includes(found?.name) ? found.name : names[0] ?? null;
    if (opened === found?.name) this.fetched = found;
    document.title = `${this.dataset.name} · workbench`;
    $("dataset-name").textContent = this.dataset.name;
    $("dataset-name").title = this.dataset.folder;
    const { classes } = this.dataset;
    this.viewer.classes = classes;
    this.strokes = new Strokes({
      changed: (indices, values) => { this.viewer.setVoxels(indices, values); this.edited(indices); },
      replaced: () => { this.viewer.setStrokes(this.strokes.labels); this.measure(); },
      status: (text, kind) => { $("saved").textContent = text; $("saved").className = kind; if (text === "Saved") this.afterSave(); },
      conflict,
    });
    this.strip = new SliceStrip($("slices"), classes, (z) => this.go(z));
    this.list = new CaseList(this.dataset, (name) => this.open(name));
    this.review = new Review($("review"), {
      viewer: this.viewer, strokes: this.strokes, classes, go: (z) => this.go(z), edited: (indices) => this.edited(indices), slice: () => this.viewer.slice, editable: () => this.editable,
    });
    this.viewer.moved = () => { this.review.position(); };
    this.pointer = new Pointer($("canvas"), $("brush"), this.viewer, {
      drawing: () => this.editable,
      colour: () => (this.label === ERASER ? "#ffffff" : classes[this.label].colour),
      begin: (erasing) => { this.value = erasing ? 0 : this.label + 1; this.strokes.begin(); },
      paint: (voxels) => this.paint(voxels),
      end: (undone) => { if (undone) this.strokes.cancel(); else this.strokes.end(); this.edited([]); },
      window: (dx, dy) => { $("contrast").value = Number($("contrast").value) + dx / 3; $("brightness").value = Number($("brightness").value) - dy / 3; this.window(); },
      take: (point) => this.takePart(point),
      scroll: (by) => this.go(this.viewer.slice + by),
    });
    this.chooser(classes);
    this.controls();
    keys(this);
    await this.open(opened);
    this.learn = new Learn($("learn"), {
      current: () => this.name, all: () => this.list.cases.map((c) => c.name), flush: () => this.strokes.flush(),
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
  image(name) { return bytes(caseUrl(name, `image/${this.channel ?? 0}`)); }

  // Whether strokes, image and prediction are all of the case named: while another one is being opened they are not.
  get editable() { return Boolean(this.name && this.strokes.labels); }

  async open(name) {
    const asked = performance.now(), turn = (this.turn = (this.turn ?? 0) + 1), before = this.name ?? this.left;
    this.strokes.end(); // a stroke still being drawn stays with its case
    this.left = before;
    this.name = null;
    if (this.strokes.name) await this.strokes.flush();
    if (turn !== this.turn) return;
    if (this.strokes.unsaved) {
      this.name = before;
      toast("The last strokes are not saved yet. Stay here until they are.", true);
      return;
    }
    this.left = null;
    this.review.close();
    $("empty").hidden = Boolean(name);
    $("cases-panel").classList.remove("open");
    this.list.select(name);
    if (!name) { this.buttons(); return; }
    this.strokes.clear();
    this.strokes.name = null;
    try {
      const early = this.fetched?.name === name ? this.fetched.image : null;
      this.fetched = null;
      const [image] = await Promise.all([early ?? this.image(name), this.strokes.open(name)]);
      if (turn !== this.turn) return;
      await this.viewer.load(image);
      if (this.strokes.shape.join() !== [...this.viewer.grid.dims].reverse().join())
        throw new Error(`The strokes of ${name} are ${this.strokes.shape.join(" × ")} voxels, its image is not; see pclmix check.`);
    } catch (error) {
      if (turn === this.turn) { this.strokes.clear(); toast(error.message ?? String(error), true); }
      takeOver();
      return;
    }
    if (turn !== this.turn) return;
    this.name = name;
    remember(name);
    window.history.replaceState(null, "", `?case=${encodeURIComponent(name)}`);
    this.viewer.radiological = $("mirror").checked && !this.dataset.picture;
    $("brightness").value = $("contrast").value = 0;
    this.viewer.setStrokes(this.strokes.labels);
    this.measure();
    this.go(this.viewer.slice);
    takeOver();
    document.body.dataset.ready = name;
    requestAnimationFrame(() => performance.measure("case", { start: asked })); // read by benchmarks/web.py
    await this.showPrediction();
  }

  async showPrediction() {
    const known = this.list.byName.get(this.name)?.predictions ?? [];
    this.strip.unsure = known[0]?.unsure ?? null;
    this.strip.render();
    await this.review.open(this.name, known);
    document.body.dataset.predicted = known[0]?.run ?? "";
  }

  async reloadCases() {
    const found = await get("dataset");
    this.list.replace(found.cases);
    this.list.setProgress(await get("progress"));
    this.learn?.enable(); // dropped while the first case opens, there is none yet
    if (!this.list.current && found.cases.length) await this.open(found.cases[0].name); // the first image of all
  }

  async predicted(cases) {
    const found = await get("dataset");
    this.list.replace(found.cases);
    this.list.render();
    if (cases.includes(this.name)) await this.showPrediction();
  }

  async changedElsewhere(event) {
    if (event.client === client) return;
    if (event.case === this.name && await this.strokes.follow(event.version)) toast("Strokes updated from another window.");
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
    this.strip.show(this.viewer.slice);
    $("corner").textContent = `Slice ${this.viewer.slice + 1} of ${this.viewer.grid.slices}`;
  }

  measure() {
    const [nx, ny, nz] = this.viewer.grid.dims;
    this.strip.measure(this.strokes.labels, nx * ny, nz);
    this.buttons();
  }

  // Strokes changed in the slice shown and at these voxels: only their slices are looked at again.
  edited(indices) {
    if (!this.strokes.labels) return;
    const [nx, ny] = this.viewer.grid.dims, slices = new Set([this.viewer.slice]);
    for (const index of indices) slices.add(Math.floor(index / (nx * ny)));
    for (const z of slices) this.strip.update(this.strokes.labels, z);
    this.strip.render();
    this.buttons();
  }

  buttons() {
    $("undo").disabled = !this.strokes.past.length;
    $("redo").disabled = !this.strokes.future.length;
  }

  paint(voxels) {
    if (!this.editable) return;
    for (const index of voxels) if (this.strokes.set(index, this.value)) this.viewer.setVoxel(index, this.value);
    this.viewer.refresh();
  }

  clearSlice() {
    if (!this.editable) return;
    const [nx, ny] = this.viewer.grid.dims, from = this.viewer.slice * nx * ny;
    this.strokes.begin("clear");
    for (let i = from; i < from + nx * ny; i++) if (this.strokes.set(i, 0)) this.viewer.setVoxel(i, 0);
    this.strokes.end();
    this.viewer.refresh();
    this.edited([]);
  }

  undo() { if (this.editable) { this.strokes.undo(); this.buttons(); } }
  redo() { if (this.editable) { this.strokes.redo(); this.buttons(); } }

  // Controls -------------------------------------------------------------------------------------------------------
  chooser(classes) {
    const entries = [...classes.map((c, k) => [k, c.name, c.colour, String(k)]).slice(1), [0, "Background", classes[0].colour, "0"], [ERASER, "Eraser", null, "E"]];
    $("classes").replaceChildren(...entries.map(([k, name, colour, key]) => {
      const dot = make("i", { className: colour ? "" : "eraser" });
      if (colour) dot.style.background = colour;
      const button = make("button", { dataset: { label: k }, onclick: () => this.choose(k) }, dot, name, key.length === 1 ? make("kbd", {}, key) : null);
      button.setAttribute("role", "radio");
      return button;
    }));
    this.choose(classes.length > 1 ? 1 : 0);
  }

  choose(label) {
    this.label = label;
    for (const button of $("classes").children) button.setAttribute("aria-checked", String(Number(button.dataset.label) === label));
  }

  pen(size) {
    const value = Math.max(1, Math.min(21, size));
    this.pointer.size = value;
    $("pen").value = value;
    $("pen-size").textContent = value;
  }

  window() { // brightness moves the window, contrast narrows it; each step is a hundredth of its width
    if (!this.viewer.window) return;
    const [low, high] = this.viewer.window, width = (high - low) || 1;
    const centre = (low + high) / 2 - (Number($("brightness").value) / 100) * width;
    const half = (width / 2) * Math.exp(-Number($("contrast").value) / 50);
    this.viewer.setWindow(centre - half, centre + half);
  }

  resetWindow() { $("brightness").value = $("contrast").value = 0; this.window(); }

  controls() {
    $("pen").oninput = () => this.pen(Number($("pen").value));
    $("undo").onclick = () => this.undo();
    $("redo").onclick = () => this.redo();
    $("clear").onclick = () => this.clearSlice();
    $("brightness").oninput = $("contrast").oninput = () => this.window();
    $("reset-window").onclick = () => this.resetWindow();
    $("fit").onclick = () => this.viewer.fit();
    $("stroke-opacity").oninput = () => { this.viewer.setStrength("stroke", Number($("stroke-opacity").value) / 100); };
    $("mirror").onchange = () => { this.viewer.radiological = $("mirror").checked; };
    $("mirror").parentElement.hidden = this.dataset.picture;
    $("help").onclick = help;
    $("export").onclick = download;
    $("history").onclick = () => { if (this.name) history(this.strokes, () => this.reopenStrokes()).catch((e) => toast(e.message, true)); };
    $("show-cases").onclick = () => $("cases-panel").classList.toggle("open");
    if (this.dataset.channels.length > 1) {
      $("channel-field").hidden = false;
      $("channel").replaceChildren(...this.dataset.channels.map((name, i) => new Option(name, i)));
      $("channel").onchange = () => { this.channel = Number($("channel").value); this.open(this.name); };
    }
    receive(this.dataset.takes, (text) => { $("saved").textContent = text; }, () => this.reloadCases());
    window.addEventListener("beforeunload", (e) => { if (this.strokes.unsaved) e.preventDefault(); });
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.strokes.flush(); });
  }

  takePart(point) {
    if (!this.review.maps?.prediction || !this.review.on.prediction) return;
    this.review.acceptPart(this.viewer.voxelAt(...point));
  }

  async reopenStrokes() {
    await this.strokes.open(this.name);
    this.viewer.setStrokes(this.strokes.labels);
    this.measure();
  }
}

const workbench = new Workbench();
workbench.start().catch((error) => toast(error.message ?? String(error), true));
