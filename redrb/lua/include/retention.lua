-- Retention of published weights: which versions stay.
--
-- The window holds the newest versions: at most `keep`, and at most as many as fit into `max_bytes` (0: no
-- limit). The versions that they stand on count as well. The newest version always stays. To load a version,
-- a reader needs the states from its anchor on: the version stands on these. A version older than the window
-- stays while a version of the window stands on it, or a reader has pinned it. Each call looks at a page.
--@include weights

-- Stored bytes of the window that begins with `first`, and of the versions that it stands on. Adapters may
-- stand on many states that are older than the window: a page of these is counted, the others are kept too.
local function bytes_of_window(first, last)
  local total, counted, from = last.all_bytes - first.all_bytes + first.stored, 0, 1
  for _ = 1, PAGE.versions do
    local found = redis.call('ZRANGEBYSCORE', loads, from, '+inf', 'LIMIT', 0, 1, 'WITHSCORES')
    local entry, state = found[1] and at(tonumber(found[1])), found[2]
    local anchor = entry and at(entry.anchor)
    if not anchor then
      break
    end
    local is_below = tonumber(state) < first.version
    local last_state = is_below and at(tonumber(state))
    local up_to = last_state and last_state.state_bytes
      or first.state_bytes - (first.kind == 'lora' and 0 or first.stored)
    total = total + math.max(0, up_to - math.max(counted, anchor.state_bytes - anchor.stored))
    counted = math.max(counted, up_to)
    if not is_below then
      break
    end
    from = '(' .. state
  end
  return total
end

-- Let the oldest versions leave the window until it fits. Returns its first version, and whether it fits.
local function move_window(keep, max_bytes, last)
  local function fits(first)
    return first.version >= last.version or last.ordinal - first.ordinal < keep
      and (max_bytes == 0 or bytes_of_window(first, last) <= max_bytes)
  end
  local first = at(tonumber(redis.call('HGET', fence, 'first')) or 0)
    or parsed(redis.call('XRANGE', versions, '-', '+', 'COUNT', 1)[1])
  local is_enough = fits(first)
  for _ = 1, PAGE.versions do
    if is_enough then
      break
    end
    redis.call('ZREM', loads, string.format('%.0f', first.version))
    first = parsed(redis.call('XRANGE', versions, '(' .. first.id, '+', 'COUNT', 1)[1])
    is_enough = fits(first)
  end
  redis.call('HSET', fence, 'first', string.format('%.0f', first.version))
  return first, is_enough
end

-- The ranges of versions that readers have pinned, each once; pins that are over are removed.
local function pinned_ranges()
  local stored = redis.call('HGETALL', pins) -- bound: readers, of which each has one pin
  local now, known, found = server_ms(), {}, {}
  for i = 1, #stored, 2 do -- bound: readers
    local low, high, deadline, ttl_ms = string.match(stored[i + 1], '^(%d+) (%d+) (%d+) (%d+)$')
    if not low or tonumber(deadline) < now then
      redis.call('HDEL', pins, stored[i])
    else
      if deadline - now > tonumber(ttl_ms) then -- the server's clock was set back since
        deadline = string.format('%.0f', now + ttl_ms)
        redis.call('HSET', pins, stored[i], table.concat({low, high, deadline, ttl_ms}, ' '))
      end
      if not known[low .. ' ' .. high] then
        known[low .. ' ' .. high] = true
        found[#found + 1] = {tonumber(low), tonumber(high)}
      end
    end
  end
  return found
end

-- Put the keys of a full version into the trash, but not those that it shares with `others`: the full
-- versions before and after it. Only full versions that follow each other share chunks.
local function discard_chunks(full, others)
  local used, places = {}, {}
  for _, other in ipairs(others) do
    for token, first, count in string.gmatch(other.full or '', '(%d+) (%d+) (%d+)') do
      used[token], places[token] = used[token] or {}, 1
      table.insert(used[token], {tonumber(first), tonumber(first) + tonumber(count)})
    end
  end
  for _, ranges in pairs(used) do
    table.sort(ranges, function(a, b) return a[1] < b[1] end)
  end
  for token, first, count in string.gmatch(full, '(%d+) (%d+) (%d+)') do
    local from, beyond, ranges = tonumber(first), tonumber(first) + tonumber(count), used[token] or {}
    while from < beyond do -- bound: ranges of a version
      local range = ranges[places[token]]
      if not range or range[1] >= beyond then
        discard_keys('chunk', token, from, beyond)
        from = beyond
      else
        discard_keys('chunk', token, from, range[1])
        from = math.max(from, range[2])
        places[token] = places[token] + (range[2] <= beyond and 1 or 0)
      end
    end
  end
end

-- Delete a version's entry; its keys go into the trash.
local function delete_version(entry)
  local version, others = string.format('%.0f', entry.version), {}
  if redis.call('ZREM', fulls, version) == 1 then
    for _, found in ipairs({
      redis.call('ZRANGEBYSCORE', fulls, version, '+inf', 'LIMIT', 0, 1),
      redis.call('ZREVRANGEBYSCORE', fulls, version, '-inf', 'LIMIT', 0, 1),
    }) do
      others[#others + 1] = found[1] and at(tonumber(found[1]))
    end
  end
  discard_chunks(entry.full or '', others)
  for token, first, count in string.gmatch(entry.pieces or '', '(%d+) (%d+) (%d+)') do
    discard_keys('delta', token, tonumber(first), tonumber(first) + tonumber(count))
  end
  redis.call('HDEL', manifests, version)
  redis.call('XDEL', versions, entry.id) -- another program's entry has another id than a version
end

-- The last version, from this one on, that the window stands on without a gap, or nil.
local function needed_to(entry)
  if entry.kind ~= 'lora' then
    local found = redis.call('ZRANGEBYSCORE', loads, string.format('%.0f', entry.version), '+inf',
      'LIMIT', 0, 1, 'WITHSCORES')
    local user = found[1] and at(tonumber(found[1]))
    return user and user.anchor > 0 and user.anchor <= entry.version and tonumber(found[2]) or nil
  end
end

-- Delete versions beyond the entry `after` that are no longer kept. Returns the page: whether more are to be
-- looked at, the entry after which, and whether the trash has keys.
local function trim(keep, max_bytes, after)
  local last = newest()
  local first, is_enough = move_window(keep, max_bytes, last)
  local before, pinned = '(' .. first.id, nil
  for _ = 1, PAGE.versions do
    local found = redis.call('XRANGE', versions, '(' .. after, before, 'COUNT', 1)[1]
    if not found then
      return {more = not is_enough, after = '0-0', trash = redis.call('EXISTS', trash) == 1}
    end
    local entry = parsed(found)
    local stays_to = needed_to(entry)
    if not stays_to then
      pinned = pinned or pinned_ranges()
      for _, range in ipairs(pinned) do
        if range[1] <= entry.version and entry.version <= range[2] then
          stays_to = math.max(stays_to or 0, range[2])
        end
      end
    end
    if not stays_to then
      delete_version(entry)
    end
    after = stays_to and stays_to > entry.version and string.format('%.0f-0', stays_to) or entry.id
  end
  return {more = true, after = after, trash = redis.call('EXISTS', trash) == 1}
end
