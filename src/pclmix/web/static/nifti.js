// A minimal NIfTI-1 reader for the first slice, with the same orientation and window as the viewer.

const RGB24 = 128;
const KINDS = { 2: Uint8Array, [RGB24]: Uint8Array, 4: Int16Array, 8: Int32Array, 16: Float32Array, 64: Float64Array, 256: Int8Array, 512: Uint16Array, 768: Uint32Array };
const BINS = 1001, TAIL = 0.02, BORDER = 0.25; // parameters of the viewer's automatic window

export async function gunzip(buffer) {
  const [first, second] = new Uint8Array(buffer, 0, 2);
  if (first !== 31 || second !== 139) return buffer;
  return new Response(new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

// {dims, pixDims, perm, oriented, coloured, voxels, scaled(value), window}, or null for files that only the viewer can read.
export function parse(buffer) {
  const view = new DataView(buffer), Kind = KINDS[view.getInt16(70, true)];
  const count = view.getInt16(40, true);
  if (view.getInt32(0, true) !== 348 || !Kind || count < 2 || count > 3) return null;
  const dims = [1, 2, 3].map((i) => (i > count ? 1 : Math.max(1, view.getInt16(40 + 2 * i, true))));
  const pixDims = [1, 2, 3].map((i) => Math.abs(view.getFloat32(76 + 4 * i, true)));
  if (pixDims.some((size) => !(size > 0))) return null;
  const coloured = view.getInt16(70, true) === RGB24, each = coloured ? 3 : Kind.BYTES_PER_ELEMENT;
  const from = view.getFloat32(108, true), size = dims[0] * dims[1] * dims[2] * each;
  if (!(from >= 348) || from + size > buffer.byteLength) return null;
  const perm = axes(affine(view, pixDims));
  if (!perm) return null;
  const voxels = new Kind(buffer.slice(from, from + size));
  const oriented = view.getInt16(252, true) > 0 || view.getInt16(254, true) > 0;
  if (coloured) return { dims, pixDims, perm, oriented, coloured, voxels, scaled: (value) => value, window: [0, 255] };
  const slope = view.getFloat32(112, true) || 1, intercept = view.getFloat32(116, true) || 0;
  const scaled = (value) => value * slope + intercept;
  const given = [view.getFloat32(128, true), view.getFloat32(124, true)];
  const window = given[1] > given[0] ? given : windowOf(voxels, dims).map(scaled);
  return { dims, pixDims, perm, oriented, coloured, voxels, scaled, window };
}

// Rows of the affine: from the sform, or from the qform if its code is higher, or scaling only.
function affine(view, [dx, dy, dz]) {
  const qform = view.getInt16(252, true), sform = view.getInt16(254, true);
  if (qform > 0 && qform > sform) {
    const [b, c, d] = [256, 260, 264].map((at) => view.getFloat32(at, true)), a = Math.sqrt(Math.max(0, 1 - b * b - c * c - d * d));
    const z = dz * (view.getFloat32(76, true) || 1);
    return [
      [(a * a + b * b - c * c - d * d) * dx, 2 * (b * c - a * d) * dy, 2 * (b * d + a * c) * z],
      [2 * (b * c + a * d) * dx, (a * a + c * c - b * b - d * d) * dy, 2 * (c * d - a * b) * z],
      [2 * (b * d - a * c) * dx, 2 * (c * d + a * b) * dy, (a * a + d * d - c * c - b * b) * z],
    ];
  }
  if (sform > 0) return [0, 1, 2].map((row) => [0, 1, 2].map((column) => view.getFloat32(280 + 16 * row + 4 * column, true)));
  return [[dx, 0, 0], [0, dy, 0], [0, 0, dz]];
}

// For each RAS axis the voxel axis along it, counted from 1, negative if reversed.
export function axes(rows) {
  const size = (row, column) => Math.abs(rows[row][column]);
  if (!rows.flat().every(Number.isFinite) || [0, 1, 2].some((i) => !(size(i, 0) + size(i, 1) + size(i, 2)) || !(size(0, i) + size(1, i) + size(2, i)))) return null;
  let first = size(1, 0) > size(0, 0) ? 1 : 0; // RAS axis of voxel axis 1
  if (size(2, 0) > size(0, 0) && size(2, 0) > size(1, 0)) first = 2;
  const [low, high] = [0, 1, 2].filter((row) => row !== first);
  const second = size(low, 1) > size(high, 1) ? low : high;
  const perm = [0, 0, 0];
  perm[first] = 1;
  perm[second] = 2;
  perm[3 - first - second] = 3;
  return perm.map((axis, row) => (rows[row][axis - 1] < 0 ? -axis : axis));
}

// Range of the central 96 % of values, ignoring voxels near the border; raw values.
function windowOf(voxels, dims) {
  const found = voxels.length > 8 ? tails(inner(voxels, dims)) : null;
  return found ?? tails(voxels) ?? extremes(voxels);
}

function inner(voxels, [nx, ny, nz]) {
  const [bx, by, bz] = [nx, ny, nz].map((n) => Math.floor(BORDER * n)), width = nx - 2 * bx;
  const found = new voxels.constructor(width * (ny - 2 * by) * (nz - 2 * bz));
  let at = 0;
  for (let z = bz; z < nz - bz; z++)
    for (let y = by; y < ny - by; y++, at += width) {
      const from = (z * ny + y) * nx + bx;
      found.set(voxels.subarray(from, from + width), at);
    }
  return found;
}

function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < values.length; i++) {
    if (values[i] < low) low = values[i];
    if (values[i] > high) high = values[i];
  }
  return [low, high];
}

function tails(values) {
  const [low, high] = extremes(values), scale = (BINS - 1) / (high - low), bins = new Uint32Array(BINS);
  let zeros = 0, missing = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] === 0) zeros++;
    if (Number.isNaN(values[i])) missing++;
    else bins[Math.round((values[i] - low) * scale)]++;
  }
  const mostlyEmpty = zeros > 0.6 * values.length; // ignore the empty background
  if (mostlyEmpty) bins[Math.round(-low * scale)] -= zeros;
  const enough = Math.round((values.length - missing - (mostlyEmpty ? zeros : 0)) * TAIL);
  if (enough < 1 || low === high) return null;
  let from = 0, to = BINS - 1, n = bins[0];
  while (n < enough) n += bins[++from];
  n = bins[to];
  while (n < enough) n += bins[--to];
  let wide = from !== to; // almost constant: extend to the nearest other value
  while (!wide && (from > 0 || to < BINS - 1)) {
    if (from > 0) wide = bins[--from] > 0;
    if (!wide && to < BINS - 1) wide = bins[++to] > 0;
  }
  const found = [from / scale + low, to / scale + low];
  return mostlyEmpty ? [Math.min(0, found[0]), found[1]] : found;
}
