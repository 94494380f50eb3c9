-- Retention of published weights: which versions stay.
--@include weights

-- Delete the entries of old versions. These stay: the newest `keep` versions, as many as fit into
-- `max_bytes` (0: all of them; the newest always stays), versions pinned by readers, and every version
-- that one of these is a delta or an adapter of. Returns the keys of the deleted versions.
local function forget(keep, max_bytes)
  local entries, places = {}, {}
  for _, found in ipairs(redis.call('XRANGE', versions, '-', '+')) do -- bound: kept versions, and pinned ones
    entries[#entries + 1] = parsed(found)
    places[entries[#entries].version] = #entries
  end

  -- Places of a version and of the versions that it is based on, and their bytes that are not marked.
  local marked = {}
  local function standing_on(place)
    local added, bytes = {place}, 0
    local entry = entries[place]
    local first = entry.anchor > 0 and places[entry.anchor] or place
    local last = entry.kind == 'lora' and (places[entry.base] or 0) or place
    for index = first, last do -- bound: kept versions, and pinned ones
      if entries[index].kind ~= 'lora' and index ~= place then
        added[#added + 1] = index
      end
    end
    for _, index in ipairs(added) do
      bytes = bytes + (marked[index] and 0 or entries[index].stored)
    end
    return added, bytes
  end

  local total = 0
  for place = #entries, math.max(1, #entries - keep + 1), -1 do -- bound: kept versions
    local added, bytes = standing_on(place)
    if place < #entries and max_bytes > 0 and total + bytes > max_bytes then
      break
    end
    total = total + bytes
    for _, index in ipairs(added) do
      marked[index] = true
    end
  end

  local pinned, now = redis.call('HGETALL', pins), server_ms() -- bound: readers, of which each has one pin
  for i = 1, #pinned, 2 do
    local low, high, deadline, ttl_ms = string.match(pinned[i + 1], '^(%d+) (%d+) (%d+) (%d+)$')
    if not low or tonumber(deadline) < now then
      redis.call('HDEL', pins, pinned[i])
    else
      if deadline - now > tonumber(ttl_ms) then -- the server's clock was set back since
        deadline = string.format('%.0f', now + ttl_ms)
        redis.call('HSET', pins, pinned[i], table.concat({low, high, deadline, ttl_ms}, ' '))
      end
      for index, entry in ipairs(entries) do
        if entry.version >= tonumber(low) and entry.version <= tonumber(high) then
          marked[index] = true
        end
      end
    end
  end

  -- a full version may hold chunks of an earlier one
  local used = {}
  for index, entry in ipairs(entries) do
    if marked[index] then
      for token, first, count in string.gmatch(entry.full or '', '(%d+) (%d+) (%d+)') do
        used[token] = used[token] or {}
        local beyond = math.min(tonumber(first) + tonumber(count), PAGE.most_chunks)
        table.insert(used[token], {tonumber(first), beyond})
      end
    end
  end
  local indices = {}
  local function is_used(token, index)
    if not used[token] then
      return false
    end
    if not indices[token] then
      indices[token] = {}
      for _, range in ipairs(used[token]) do
        for place = range[1], range[2] - 1 do -- bound: PAGE.most_chunks
          indices[token][place] = true
        end
      end
    end
    return indices[token][index]
  end

  local names = {}
  for index, entry in ipairs(entries) do
    if not marked[index] then
      add_keys(names, 'chunk', entry.full, is_used)
      add_keys(names, 'delta', entry.pieces)
      redis.call('HDEL', manifests, string.format('%.0f', entry.version))
      redis.call('XDEL', versions, string.format('%.0f-0', entry.version))
    end
  end
  return names
end
