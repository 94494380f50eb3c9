-- The entries that a transaction has added to the stream: found, counted once, or taken out again.
--@include task put_record facts pools unrecorded

-- Take entries that the task does not count out of the stream and the pools. Their facts go first: if this
-- fails midway, the entries that are left are no groups.
local function take_out(seqs)
  local members = {}
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  local all = facts_of_all(members)
  in_parts('HDEL', key('facts'), members)
  for i, member in ipairs(members) do
    for _, group in ipairs(all[i] and groups() or {}) do
      local pool = pool_of(group, all[i].status)
      if redis.call('ZSCORE', key('ready', pool), member) then
        withdraw(group, pool, {member}, {all[i]})
      end
    end
    redis.call('XDEL', stream, id_of(seqs[i]))
  end
end

-- Take out the `count` newest entries.
local function take_out_newest(count)
  local newest = count > 0 and redis.call('XREVRANGE', stream, '+', '-', 'COUNT', count) or {}
  for i, entry in ipairs(newest) do
    newest[i] = seq_of(entry[1])
  end
  take_out(newest)
end

-- Remove entries of transactions whose script failed, or was unknown to the server: they lie beyond
-- `last`, the last id that the task counts, and up to the id `to`. Returns whether there may be more.
local function remove_orphans(last, to)
  local orphans, more = entries_beyond(last, to)
  if groups_among(orphans) > 0 then
    refuse_puts('does not count all groups')
  end
  take_out(orphans)
  if #orphans > 0 then
    redis.call('HSET', puts, 'last', string.format('%d', orphans[#orphans]))
  end
  return more
end

-- The id before the first of the `count` entries that this transaction has added, where entries lie
-- between these and `last`, the last id that the task counts. These orphans are removed: nil if there are
-- more of them. If they are groups, only the entries of this transaction go.
local function find_added(last, count)
  local added = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', math.max(count, 1))
  local before = seq_of(added[math.max(count, 1)][1]) - (count > 0 and 1 or 0)
  local done, more = pcall(remove_orphans, last, id_of(before))
  if not done or more then
    take_out_newest(count)
  end
  if not done then
    error(more, 0)
  end
  return not more and before or nil
end

-- Take out the `count` entries beyond the id `before`; later ids count on behind them.
local function undo(before, count)
  local seqs = {}
  for i = 1, count do -- bound: entries of the put
    seqs[i] = before + i
  end
  take_out(seqs)
  redis.call('HSET', puts, 'last', string.format('%d', before + count))
end

-- Count a put no more: `known` holds its producer's record and the counters, as they were before it.
local function restore_record(producer, known, before)
  redis.call('HSET', puts, 'last', string.format('%d', before), 'put', known[3] or '0',
    'samples_put', known[4] or '0', 'bytes_put', known[5] or '0')
  if known[1] then
    redis.call('HSET', puts, producer, known[1])
  else
    redis.call('HDEL', puts, producer)
  end
end
