-- Entries that are done in all consumer groups: deleted, or kept as history.
--
-- The sorted set archive holds history by the time of its last acknowledgement, so it has the same order
-- whenever and in whatever pages the last consumer group is done with it. History takes no room: its
-- bytes (kept_bytes) count toward max_bytes, and the oldest is deleted when a put needs them.
--@include task facts

-- Bytes of entries as max_bytes counts them: of those put since the task has that setting.
local function bytes_of(seqs)
  local bytes, since, members = 0, number(task, 'sized_after'), {}
  for _, seq in ipairs(seqs) do
    if tonumber(seq) > since then
      members[#members + 1] = member_of(seq)
    end
  end
  for _, facts in ipairs(facts_of_all(members)) do
    bytes = bytes + (facts and facts.size or 0)
  end
  return bytes
end

-- Delete entries. Returns the number of entries that existed.
local function delete(seqs)
  local deleted = 0
  if rules().max_bytes > 0 then
    add(task, 'bytes', -bytes_of(seqs))
  end
  for first = 1, #seqs, PAGE.arguments do
    local ids, members = {}, {}
    for i = first, math.min(first + PAGE.arguments - 1, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
      members[i - first + 1] = member_of(seqs[i])
    end
    deleted = deleted + redis.call('XDEL', stream, unpack(ids))
    redis.call('HDEL', key('facts'), unpack(members))
    if redis.call('EXISTS', key('behind'), key('buried')) > 0 then
      redis.call('ZREM', key('behind'), unpack(members))
      redis.call('ZREM', key('buried'), unpack(members))
    end
  end
  return deleted
end

-- Count the bytes of entries that become history (sign 1) or stop being history (-1).
local function count_history(seqs, sign)
  if #seqs > 0 and rules().max_bytes > 0 then
    add(task, 'kept_bytes', sign * bytes_of(seqs))
  end
end

-- Delete entries of the history, by member. Returns their number.
local function drop_history(members)
  local seqs = {}
  for i, member in ipairs(members) do
    seqs[i] = string.match(member, '[1-9]%d*')
  end
  in_parts('ZREM', key('archive'), members)
  count_history(seqs, -1)
  return delete(seqs)
end

-- Delete history that is too old or too much, at most `most` entries of either. Returns their number.
local function trim_history(most)
  local rule, archive, over = rules(), key('archive'), {}
  if rule.keep_ms then
    local latest = string.format('%.0f', server_ms() - rule.keep_ms)
    over = redis.call('ZRANGEBYSCORE', archive, '-inf', latest, 'LIMIT', 0, most)
  end
  if rule.keep_groups then
    local excess = math.min(redis.call('ZCARD', archive) - rule.keep_groups - #over, most)
    if excess > 0 then
      for _, member in ipairs(redis.call('ZRANGE', archive, #over, #over + excess - 1)) do
        over[#over + 1] = member
      end
    end
  end
  return drop_history(over)
end

-- Make entries history, each with the time of its acknowledgement. Returns the number of older entries
-- deleted for that.
local function retire(seqs, times)
  local fresh = {}
  for i, seq in ipairs(seqs) do
    if redis.call('ZADD', key('archive'), string.format('%.0f', times[i]), member_of(seq)) == 1 then
      fresh[#fresh + 1] = seq
    end
  end
  count_history(fresh, 1)
  return trim_history(PAGE.history_beside + #seqs)
end

-- Delete the oldest history, a page at most, until there is room for so many bytes more. Returns whether more
-- of it must go.
local function free_history(bytes)
  local known = numbers(task, 'max_bytes', 'bytes', 'sized_after')
  local excess = known[1] > 0 and known[2] + bytes - known[1] or 0
  if excess <= 0 then
    return false
  end
  local oldest, gone = redis.call('ZRANGE', key('archive'), 0, PAGE.history_freed - 1), {}
  for i, facts in ipairs(facts_of_all(oldest)) do
    if excess > 0 then
      gone[i] = oldest[i]
      excess = excess - (facts and tonumber(oldest[i]) > known[3] and facts.size or 0)
    end
  end
  drop_history(gone)
  return excess > 0 and #oldest == PAGE.history_freed
end
