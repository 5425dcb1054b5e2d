// Images larger than the 3-D textures of the graphics card: the slice shown, as 2-D textures in RAS order with a shader
// of their own. NiiVue itself would show them without colour, without turning them to RAS, and always the same slice.

import { read } from "./viewer.js";

const UNITS = { image: 11, drawn: 12, doubt: 13 }; // texture units that NiiVue does not use here
const HEADER = 352, UINT8 = 2; // bytes before the voxels of a NIfTI file, and a NIfTI data type

const source = (p, q) => `#version 300 es
precision highp int;
precision highp float;
uniform highp sampler2D image;
uniform highp sampler2D drawn;
uniform highp sampler2D doubt;
uniform highp sampler2D colormap;
uniform vec3 tint;
uniform vec3 range;
in vec3 texPos;
out vec4 color;
void main() {
  vec2 at = vec2(texPos[${p}], texPos[${q}]);
  color = vec4(texture(image, at).rgb, 1.0);
  float value = texture(drawn, at).r;
  if (value > 0.0) {
    float rows = float(textureSize(colormap, 0).y);
    vec4 own = texture(colormap, vec2((value * 255.0 + 0.5) / 256.0, (rows - 0.5) / rows));
    color.rgb = mix(color.rgb, own.rgb, own.a);
  }
  float share = clamp((texture(doubt, at).r * 255.0 - range.x) / (range.y - range.x), 0.0, 1.0);
  color.rgb = mix(color.rgb, tint, share * range.z);
}`;

export class Flat {
  constructor(viewer) {
    this.viewer = viewer;
    this.programs = new Map(); // by the RAS axis along which slices lie
    this.textures = {};
  }

  // Called once the grid of the viewer is that of the image.
  open() {
    const { nv, grid } = this.viewer, [p, q] = (this.axes = grid.plane());
    this.size = [grid.ras[p], grid.ras[q]];
    this.map = null;
    if (!this.programs.has(grid.depth)) {
      nv.customSliceShader = null; // it would be deleted
      nv.setCustomSliceShader(source(p, q));
      this.programs.set(grid.depth, nv.customSliceShader);
    }
    nv.customSliceShader = this.shader = this.programs.get(grid.depth);
    this.shader.use(nv.gl);
    for (const [name, unit] of Object.entries(UNITS)) nv.gl.uniform1i(this.shader.uniforms[name], unit);
    this.show();
  }

  show() {
    this.slice = this.viewer.slice;
    this.paint();
    this.draw("all");
    this.glow();
  }

  // Values of the slice in RAS order, `each` per voxel; from(native index) is where those of a voxel begin.
  gather(values, each, Kind) {
    const { grid } = this.viewer, [p, q] = this.axes, [width, height] = this.size, found = new Kind(each * width * height);
    const at = grid.rasVoxel(0, 0, this.slice);
    at[p] = 0;
    for (let y = 0, to = 0; y < height; y++) {
      at[q] = y;
      for (let x = 0, from = grid.native(...at); x < width; x++, from += grid.step[p])
        for (let k = 0; k < each; k++) found[to++] = values[each * from + k];
    }
    return found;
  }

  // The image in the current window.
  paint() {
    const { gl } = this.viewer.nv, { intensity, volume } = this.viewer, { low, high, coloured } = intensity;
    const { scl_slope: slope, scl_inter: intercept } = volume.hdr, scale = 255 / (high - low);
    const values = coloured ? this.gather(intensity.original, 3, Uint8Array) : this.gather(volume.img, 1, volume.img.constructor);
    const bytes = new Uint8ClampedArray(values.length), [a, b] = coloured ? [1, 0] : [slope, intercept];
    for (let i = 0; i < values.length; i++) bytes[i] = (values[i] * a + b - low) * scale;
    this.send("image", coloured ? gl.RGB : gl.LUMINANCE, bytes, ...this.size);
    gl.generateMipmap(gl.TEXTURE_2D);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MIN_FILTER, gl.LINEAR_MIPMAP_LINEAR);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MAG_FILTER, gl.LINEAR);
  }

  // Strokes and prediction: the whole slice, or a box of RAS voxels that has changed.
  draw(box) {
    const { nv, grid } = this.viewer, { gl } = nv, [p, q] = this.axes, at = grid.rasVoxel(0, 0, this.slice), bitmap = nv.drawBitmap;
    if (!bitmap) { this.send("drawn", gl.LUMINANCE, new Uint8Array(1), 1, 1); return; } // the strokes are sent next
    if (box !== "all" && (at[grid.depth] < box.low[grid.depth] || at[grid.depth] > box.high[grid.depth])) return;
    const [left, bottom] = box === "all" ? [0, 0] : [box.low[p], box.low[q]];
    const [width, height] = box === "all" ? this.size : [box.high[p] - left + 1, box.high[q] - bottom + 1];
    const bytes = new Uint8Array(width * height), first = at[grid.depth] * grid.rasStep[grid.depth];
    for (let y = 0, to = 0; y < height; y++)
      for (let x = 0; x < width; x++) bytes[to++] = bitmap[first + (left + x) * grid.rasStep[p] + (bottom + y) * grid.rasStep[q]];
    if (box === "all") this.send("drawn", gl.LUMINANCE, bytes, width, height);
    else this.send("drawn", gl.LUMINANCE, bytes, width, height, [left, bottom]);
  }

  // Uncertainty: a map of bytes in native order, shown from `low` to `high`; null removes it.
  setDoubt(map, [low, high], strength, tint) {
    Object.assign(this, { map, low, high, strength, tint });
    this.glow();
    this.viewer.nv.drawScene();
  }

  setStrength(strength) {
    this.strength = strength;
    this.limits();
    this.viewer.nv.drawScene();
  }

  glow() {
    const { gl } = this.viewer.nv;
    if (this.map) this.send("doubt", gl.LUMINANCE, this.gather(this.map, 1, Uint8Array), ...this.size);
    else this.send("doubt", gl.LUMINANCE, new Uint8Array(1), 1, 1);
    this.limits();
  }

  limits() {
    const { gl } = this.viewer.nv, [low, high, strength] = this.map ? [this.low, this.high, this.strength] : [0, 1, 0];
    this.shader.use(gl);
    gl.uniform3f(this.shader.uniforms.range, low, high, strength);
    if (this.map) gl.uniform3f(this.shader.uniforms.tint, ...this.tint.map((v) => v / 255));
  }

  // Upload bytes as the whole texture, or as a part of it at `place`.
  send(name, format, bytes, width, height, place = null) {
    const { gl } = this.viewer.nv;
    this.textures[name] ??= gl.createTexture();
    gl.activeTexture(gl.TEXTURE0 + UNITS[name]);
    gl.bindTexture(gl.TEXTURE_2D, this.textures[name]);
    gl.pixelStorei(gl.UNPACK_ALIGNMENT, 1);
    if (place) gl.texSubImage2D(gl.TEXTURE_2D, 0, ...place, width, height, format, gl.UNSIGNED_BYTE, bytes);
    else gl.texImage2D(gl.TEXTURE_2D, 0, format, width, height, 0, format, gl.UNSIGNED_BYTE, new Uint8Array(bytes.buffer));
    for (const filter of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, filter, gl.NEAREST);
    for (const side of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T]) gl.texParameteri(gl.TEXTURE_2D, side, gl.CLAMP_TO_EDGE);
  }
}

// A volume of at most two voxels a side in the place of a large one, from which NiiVue takes the geometry.
export function standIn({ dims, pixDims, affine }) {
  const counts = [1, 2, 3].map((i) => Math.min(2, Math.max(1, dims[i]))), scale = counts.map((n, i) => Math.max(1, dims[i + 1]) / n);
  const buffer = new ArrayBuffer(HEADER + counts[0] * counts[1] * counts[2]), view = new DataView(buffer);
  view.setInt32(0, 348, true);
  [3, ...counts, 1, 1, 1, 1].forEach((n, i) => view.setInt16(40 + 2 * i, n, true));
  view.setInt16(70, UINT8, true);
  view.setInt16(72, 8, true);
  [1, ...[1, 2, 3].map((i) => (Math.abs(pixDims[i]) || 1) * scale[i - 1])].forEach((size, i) => view.setFloat32(76 + 4 * i, size, true));
  view.setFloat32(108, HEADER, true);
  view.setFloat32(112, 1, true);
  view.setUint8(123, 2); // mm
  view.setInt16(254, 1, true);
  for (let row = 0; row < 3; row++) {
    const [a, b, c, d] = affine[row], columns = [a, b, c];
    const origin = columns.reduce((sum, v, i) => sum + (v * (scale[i] - 1)) / 2, d); // the centre of the first, larger voxel
    [...columns.map((v, i) => v * scale[i]), origin].forEach((v, i) => view.setFloat32(280 + 16 * row + 4 * i, v, true));
  }
  new Uint8Array(buffer, 344).set([0x6e, 0x2b, 0x31, 0]);
  new Uint8Array(buffer, HEADER).fill(1).fill(0, 0, 1);
  return read(buffer, "geometry", { colormap: "gray" });
}
