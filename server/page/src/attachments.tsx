// Images in the message field and in messages.
import { useEffect, useState } from 'preact/hooks';
import { imageUrl } from './image_store';
import type { MessageImage } from './types';

// The data URL of an image; null if it is no longer stored, undefined until that is known.
function useImageUrl(id: string): string | null | undefined {
  const [url, setUrl] = useState<string | null>();
  useEffect(() => {
    let isShown = true;
    void imageUrl(id).then((read) => isShown && setUrl(read));
    return () => {
      isShown = false;
    };
  }, [id]);
  return url;
}

export function Thumbnail({ image, onRemove }: { image: MessageImage; onRemove?: () => void }) {
  const url = useImageUrl(image.id);
  const [large, setLarge] = useState(false);
  return (
    <li class={large ? 'image large' : 'image'}>
      {url ? (
        <button
          type="button"
          class="view"
          aria-pressed={large}
          aria-label={`Enlarge ${image.name}`}
          onClick={() => setLarge(!large)}
        >
          <img src={url} alt={image.name} width={image.width} height={image.height} />
        </button>
      ) : (
        <span class="hint">{url === null && `${image.name} is no longer stored in this browser, and not sent.`}</span>
      )}
      {onRemove && (
        <button type="button" class="icon remove" aria-label={`Remove ${image.name}`} onClick={onRemove}>
          ×
        </button>
      )}
    </li>
  );
}

export function Thumbnails({
  images,
  label,
  onRemove,
}: {
  images: MessageImage[];
  label: string;
  onRemove?: (id: string) => void;
}) {
  return (
    <ul class="images" aria-label={label}>
      {images.map((image) => (
        <Thumbnail key={image.id} image={image} {...(onRemove && { onRemove: () => onRemove(image.id) })} />
      ))}
    </ul>
  );
}
