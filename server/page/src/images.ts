// Images of messages as data URLs: read from files, scaled down where they are large, within the limits of a request.
import { newId } from './store';
import type { MessageImage } from './types';

// Of the prompt, as the server reads at most.
export const MAX_IMAGES = 16;
// Of the longer side, in pixels; most vision models scale to less.
const MAX_SIDE = 2048;
// Of a file as it is sent: MAX_IMAGES of them in base64 fit into a request of 64 MiB.
const MAX_BYTES = 2.5 * 2 ** 20;
// Sides and JPEG qualities of an image that is encoded again: the first one whose file is small enough.
const ENCODINGS = [
  [MAX_SIDE, 0.9],
  [MAX_SIDE, 0.75],
  [MAX_SIDE / 2, 0.75],
] as const;

export interface ReadImage {
  image: MessageImage;
  url: string;
}

// The image of a file; an Error with the reason if the browser cannot read it.
export async function readImage(file: File): Promise<ReadImage> {
  const address = URL.createObjectURL(file);
  try {
    const picture = new Image();
    picture.src = address;
    await picture.decode();
    const { naturalWidth: width, naturalHeight: height } = picture;
    const type = await typeOf(file);
    const isSmall = Math.max(width, height) <= MAX_SIDE && file.size <= MAX_BYTES;
    const sent = type && isSmall ? new Blob([file], { type }) : await encoded(picture);
    return { image: { id: newId(), name: file.name || 'Image', width, height }, url: await dataUrl(sent) };
  } catch {
    throw new Error(`${file.name || 'The image'} is no image that this browser can read.`);
  } finally {
    URL.revokeObjectURL(address);
  }
}

// The type by the first bytes, as the server checks it: that of the browser follows the file's name.
async function typeOf(file: File): Promise<string | null> {
  const bytes = new Uint8Array(await file.slice(0, 12).arrayBuffer());
  const text = String.fromCharCode(...bytes);
  if (text.startsWith('\x89PNG\r\n\x1a\n')) return 'image/png';
  if (text.startsWith('\xff\xd8\xff')) return 'image/jpeg';
  if (/^GIF8[79]a/.test(text)) return 'image/gif';
  return /^RIFF[^]{4}WEBP/.test(text) ? 'image/webp' : null;
}

// A JPEG of the picture, on white where it is transparent.
async function encoded(picture: HTMLImageElement): Promise<Blob> {
  const longer = Math.max(picture.naturalWidth, picture.naturalHeight);
  for (const [side, quality] of ENCODINGS) {
    const scale = Math.min(1, side / longer);
    const canvas = document.createElement('canvas');
    canvas.width = Math.max(1, Math.round(picture.naturalWidth * scale));
    canvas.height = Math.max(1, Math.round(picture.naturalHeight * scale));
    const context = canvas.getContext('2d')!;
    context.fillStyle = '#fff';
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, 'image/jpeg', quality));
    if (blob && blob.size <= MAX_BYTES) return blob;
  }
  throw new Error('too large');
}

function dataUrl(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error!);
    reader.readAsDataURL(blob);
  });
}

// The image files of a paste or a drop.
export function imageFiles(data: DataTransfer | null): File[] {
  return [...(data?.files ?? [])].filter((file) => file.type.startsWith('image/'));
}
