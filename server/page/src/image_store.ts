// The data URLs of images in the browser's IndexedDB: local storage, which holds the conversations, is too small for them.
const DATABASE = 'cellar';
const STORE = 'images';
// Unused images of this age are deleted; younger ones may belong to a message that another tab is sending.
const UNUSED_MS = 3_600_000;

interface Entry {
  url: string;
  kept: number;
}

// Of this tab, also where the browser stores nothing.
const urls = new Map<string, string>();
let opened: Promise<IDBDatabase> | undefined;

function database(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error!);
  });
  return opened;
}

// Calls `work` with the store; what its request gives when the transaction is complete.
async function within<Value>(
  mode: IDBTransactionMode,
  work: (store: IDBObjectStore) => IDBRequest<Value>,
): Promise<Value> {
  const transaction = (await database()).transaction(STORE, mode);
  return new Promise((resolve, reject) => {
    const request = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error!);
  });
}

// False if the browser does not store it; the image is there until the tab is closed.
export async function keepImage(id: string, url: string): Promise<boolean> {
  urls.set(id, url);
  try {
    await within('readwrite', (store) => store.put({ url, kept: Date.now() } satisfies Entry, id));
    return true;
  } catch {
    return false;
  }
}

// Null if the image is no longer stored.
export async function imageUrl(id: string): Promise<string | null> {
  const url = urls.get(id);
  if (url) return url;
  const entry = await within<Entry | undefined>('readonly', (store) => store.get(id)).catch(() => undefined);
  if (entry) urls.set(id, entry.url);
  return entry?.url ?? null;
}

export async function deleteImages(ids: string[]): Promise<void> {
  for (const id of ids) {
    urls.delete(id);
    await within('readwrite', (store) => store.delete(id)).catch(() => undefined);
  }
}

// Deletes the images that no conversation has.
export async function deleteUnusedImages(used: Set<string>): Promise<void> {
  const ids = await within('readonly', (store) => store.getAllKeys()).catch(() => []);
  for (const id of ids.map(String).filter((id) => !used.has(id))) {
    const entry = await within<Entry | undefined>('readonly', (store) => store.get(id)).catch(() => undefined);
    if (entry && entry.kept < Date.now() - UNUSED_MS) await deleteImages([id]);
  }
}
