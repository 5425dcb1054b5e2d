// Wrapper of NiiVue: one volume in one or three planes, overlays, voxels under the pointer.

import { Niivue, NVImage } from "./vendor/niivue.js";
import { Flat, standIn } from "./flat.js";
import { Grid } from "./grid.js";
import { layout, Plane } from "./planes.js";
import { Layers } from "./layers.js";
import { Intensity } from "./intensity.js";

const LARGEST_ZOOM = 40;
const UNITS = { 1: 1000, 2: 1, 3: 0.001 }; // NIfTI's metre, millimetre and micrometre, in mm
// Image, then the drawing layer, then one overlay: without the branches of NiiVue's shader that are not used here, which
// take half of a frame where there is no graphics card.
const SLICE = `#version 300 es
precision highp int;
precision highp float;
uniform highp sampler3D volume;
uniform highp sampler3D overlay;
uniform highp sampler3D drawing;
uniform highp sampler2D colormap;
uniform float overlays;
in vec3 texPos;
out vec4 color;
void main() {
  color = vec4(texture(volume, texPos).rgb, 1.0);
  float drawn = texture(drawing, texPos).r;
  if (drawn > 0.0) {
    float rows = float(textureSize(colormap, 0).y);
    vec4 own = texture(colormap, vec2((drawn * 255.0 + 0.5) / 256.0, (rows - 0.5) / rows));
    color.rgb = mix(color.rgb, own.rgb, own.a);
  }
  if (overlays > 0.0) {
    vec4 over = texture(overlay, texPos);
    color.rgb = mix(color.rgb, over.rgb, over.a);
  }
}`;

export class Viewer {
  constructor(canvas) {
    this.canvas = canvas;
    this.nv = new Niivue({
      interactive: false, dragAndDropEnabled: false, isOrientationTextVisible: false, crosshairWidth: 0,
      backColor: [0, 0, 0, 1], loadingText: "", logLevel: "error", isRadiologicalConvention: true,
      isColorbar: false, show3Dcrosshair: false, isResizeCanvas: true, gradientOrder: 0,
    });
    this.grid = null;
    this.three = false;
    this.flat = null; // for images larger than the 3-D textures of the graphics card
    this.cross = [0, 0, 0]; // native column, row and slice where the planes meet
    this.layers = new Layers(this);
    this.intensity = new Intensity(this);
    this.moved = () => {};
  }

  async start() {
    await this.nv.attachToCanvas(this.canvas, false);
    this.nv.drawOpacity = 1;
    this.fillBoxes();
    this.plainDrawing();
    this.nv.setCustomSliceShader(SLICE);
    this.shader = this.nv.customSliceShader;
    new ResizeObserver(() => { this.arrange(); }).observe(this.canvas);
  }

  // Let each plane fill its box, so that a zoomed image uses the space beside it.
  fillBoxes() {
    const { nv } = this, tight = nv.screenFieldOfViewExtendedVox.bind(nv);
    nv.calculateWidthHeight = (type, scale, width, height) => [width, height];
    nv.screenFieldOfViewExtendedVox = (type = 0) => {
      const screen = tight(type), box = this.boxes?.find(([depth]) => depth === 2 - type);
      if (!box) return screen;
      const wanted = box[3] / box[4], is = screen.fovMM[0] / screen.fovMM[1], i = is < wanted ? 0 : 1;
      const more = screen.fovMM[i] * (i === 0 ? wanted / is - 1 : is / wanted - 1);
      screen.mnMM[i] -= more / 2;
      screen.mxMM[i] += more / 2;
      screen.fovMM[i] += more;
      return screen;
    };
  }

  // One drawing layer without NiiVue's own undo, which would search and compress the whole volume.
  plainDrawing() {
    const { nv } = this;
    nv.createEmptyDrawing = () => {
      nv.drawBitmap = new Uint8Array(this.grid.size);
      nv.drawTexture = nv.r8Tex(nv.drawTexture, nv.gl.TEXTURE7, nv.back.dims); // the strokes are sent next
    };
    nv.refreshDrawing = () => {
      const { gl } = nv;
      if (this.flat) { this.flat.draw("all"); return; }
      gl.activeTexture(gl.TEXTURE7);
      gl.bindTexture(gl.TEXTURE_3D, nv.drawTexture);
      gl.texSubImage3D(gl.TEXTURE_3D, 0, 0, 0, 0, ...this.grid.ras, gl.RED, gl.UNSIGNED_BYTE, nv.drawBitmap);
    };
  }

  async load(buffer, slice) {
    const volume = await read(buffer, "image", { colormap: "gray" });
    const { hdr } = volume, largest = Math.max(...hdr.dims.slice(1, 4)), { max2D, max3D } = this.nv.uiData;
    if (largest > max2D) throw new Error(`This image is ${hdr.dims[1]} × ${hdr.dims[2]} pixels; the graphics of this computer show at most ${max2D} along a side.`);
    const large = largest > max3D, shown = large ? await standIn(hdr) : volume;
    this.nv.volumes = [];
    this.nv.drawBitmap = null;
    this.nv.customSliceShader = this.shader;
    this.flat = null;
    this.nv.addVolume(shown);
    this.volume = volume;
    this.grid = new Grid(hdr.dims.slice(1, 4).map((n) => Math.max(1, n)), volume.permRAS);
    const unit = UNITS[hdr.xyzt_units & 7] ?? 1, size = [1, 2, 3].map((i) => (Math.abs(hdr.pixDims[i]) || 1) * unit);
    this.spacing = this.grid.axis.map((a) => size[a]); // millimetres along RAS axes
    this.affine = millimetres(hdr.affine, size, unit);
    this.oriented = hdr.sform_code > 0 || hdr.qform_code > 0;
    this.intensity.reset();
    this.layers.reset();
    this.nv.scene.pan2Dxyzmm = [0, 0, 0, 1];
    const [nx, ny, nz] = this.grid.dims;
    this.cross = [Math.floor(nx / 2), Math.floor(ny / 2), Math.max(0, Math.min(nz - 1, slice ?? Math.floor(nz / 2)))];
    if (large) (this.flat = this.plane2D ??= new Flat(this)).open();
    this.nv.setDrawingEnabled(true);
    this.arrange();
  }

  // Navigation ----------------------------------------------------------------------------------------------------
  get slice() { return this.cross[2]; }

  // Whether the volume has enough slices for the other two planes.
  get hasDepth() { return Boolean(this.grid) && !this.flat && this.grid.slices > 3; }

  set planes(three) { this.three = three; this.arrange(); }

  arrange() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!this.grid || !width || !height) return;
    const dpr = this.nv.uiData.dpr || 1;
    if (Math.abs(this.canvas.width - width * dpr) >= 1 || Math.abs(this.canvas.height - height * dpr) >= 1) this.nv.resizeListener();
    this.boxes = layout(this.grid.depth, this.three && this.hasDepth, width, height);
    this.nv.customLayout = this.boxes.map(([depth, left, top, w, h]) => ({
      sliceType: 2 - depth, position: [left / width, top / height, Math.min(w / width, 1 - left / width), Math.min(h / height, 1 - top / height)],
    }));
    this.draw();
  }

  draw() {
    if (!this.grid) return;
    if (this.flat && this.flat.slice !== this.slice) this.flat.show();
    this.nv.scene.crosshairPos = [0, 1, 2].map((i) => (this.grid.along(i, this.cross) + 0.5) / this.grid.ras[i]);
    this.nv.drawScene();
    this.moved();
  }

  show(slice) { this.look([this.cross[0], this.cross[1], slice]); }

  look(voxel) {
    this.cross = voxel.map((v, a) => Math.max(0, Math.min(this.grid.dims[a] - 1, v)));
    this.draw();
  }

  // Scroll by `by` slices along RAS axis `depth`.
  scroll(depth, by) {
    const next = [...this.cross];
    next[this.grid.axis[depth]] += by;
    this.look(next);
  }

  set radiological(value) { this.nv.opts.isRadiologicalConvention = value; this.draw(); }

  get zoomed() { return this.nv.scene.pan2Dxyzmm[3]; }

  fit() { this.pan2D([0, 0, 0, 1]); }

  pan2D(pan) { this.nv.scene.pan2Dxyzmm = pan; this.draw(); }

  // Zoom by a factor around a point.
  zoom(factor, x, y) {
    const plane = this.at(x, y), pan = [...this.nv.scene.pan2Dxyzmm];
    if (!plane) return;
    const before = plane.fraction(x, y);
    pan[3] = Math.max(1, Math.min(LARGEST_ZOOM, pan[3] * factor));
    if (pan[3] === 1) { this.fit(); return; }
    this.pan2D(pan);
    const after = this.at(x, y)?.fraction(x, y);
    if (after) this.shift(before, after);
  }

  pan(dx, dy, x, y) {
    const plane = this.at(x, y) ?? this.tiles[0];
    if (plane) this.shift(plane.fraction(x - dx, y - dy), plane.fraction(x, y));
  }

  shift(before, after) { // pan so that the point at `after` moves to `before`
    const a = this.nv.frac2mm(before), b = this.nv.frac2mm(after), pan = [...this.nv.scene.pan2Dxyzmm];
    for (let i = 0; i < 3; i++) pan[i] += (b[i] - a[i]) * pan[3]; // the viewer pans before it zooms
    this.pan2D(pan);
  }

  // Centre a voxel in every plane, with at least the given zoom.
  centre(voxel, zoom = 1) {
    this.look(voxel);
    const factor = Math.max(zoom, this.zoomed), at = this.nv.frac2mm(this.nv.scene.crosshairPos), middle = this.nv.frac2mm([0.5, 0.5, 0.5]);
    this.pan2D([...[0, 1, 2].map((i) => middle[i] - at[i] * factor), factor]);
  }

  // Planes and voxels ----------------------------------------------------------------------------------------------
  get tiles() {
    if (!this.grid) return [];
    const drawn = this.nv.screenSlices ?? []; // a new array on every draw
    if (this.drawn !== drawn) [this.drawn, this.shown] = [drawn, drawn.map((tile, number) => new Plane(this, number, tile))];
    return this.shown;
  }

  at(x, y) { return this.tiles.find((plane) => plane.contains(x, y)); }

  // RAS position of the centre of a native voxel in mm.
  millimetres(voxel) {
    const { affine } = this;
    return [0, 1, 2].map((row) => affine[row][0] * voxel[0] + affine[row][1] * voxel[1] + affine[row][2] * voxel[2] + affine[row][3]);
  }
}

// The affine in mm. The size of a voxel is that of pixdim, as everywhere else: some files have an sform of 1 mm.
function millimetres(affine, size, unit) {
  const length = [0, 1, 2].map((column) => Math.hypot(...[0, 1, 2].map((row) => affine[row][column])) || 1);
  return [0, 1, 2].map((row) => [...size.map((mm, column) => (affine[row][column] / length[column]) * mm), affine[row][3] * unit]);
}

// A volume from the bytes of a NIfTI file, gzipped or not.
export function read(buffer, name, options = {}) {
  const [first, second] = new Uint8Array(buffer, 0, 2);
  return NVImage.loadFromUrl({ url: buffer, name: `${name}.nii${first === 31 && second === 139 ? ".gz" : ""}`, ...options });
}
