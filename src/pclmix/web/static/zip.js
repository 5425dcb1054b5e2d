// Files as one uncompressed zip, so that a folder of thousands of slices is one upload. The browser reads the files from
// disk again while sending, so only one of them is in memory at a time.

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

export function crc32(bytes) {
  let crc = 0xffffffff;
  for (let i = 0; i < bytes.length; i++) crc = TABLE[(crc ^ bytes[i]) & 255] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

// A record of little-endian numbers: [value, bytes], ...
function record(...fields) {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [, size]) => sum + size, 0)));
  let at = 0;
  for (const [value, size] of fields) {
    if (size === 4) view.setUint32(at, value, true);
    else view.setUint16(at, value, true);
    at += size;
  }
  return view.buffer;
}

// items: {path, file}, less than 4 GiB and 65,535 files; progress(fraction) is called as files are read.
export async function zip(items, progress = () => {}) {
  const parts = [], index = [];
  let offset = 0, indexSize = 0;
  for (const [number, { path, file }] of items.entries()) {
    const name = new TextEncoder().encode(path), crc = crc32(new Uint8Array(await file.arrayBuffer()));
    // Needs version 2.0, names in UTF-8, stored; fixed date (1 January 1980).
    const about = [[20, 2], [0x0800, 2], [0, 2], [0, 2], [33, 2], [crc, 4], [file.size, 4], [file.size, 4], [name.length, 2], [0, 2]];
    parts.push(record([0x04034b50, 4], ...about), name, file);
    index.push(record([0x02014b50, 4], [20, 2], ...about, [0, 2], [0, 2], [0, 2], [0, 4], [offset, 4]), name);
    offset += 30 + name.length + file.size;
    indexSize += 46 + name.length;
    progress((number + 1) / items.length);
  }
  const count = items.length;
  return new Blob([...parts, ...index, record([0x06054b50, 4], [0, 2], [0, 2], [count, 2], [count, 2], [indexSize, 4], [offset, 4], [0, 2])]);
}
