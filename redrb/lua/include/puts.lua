-- The entries that a transaction has added to the stream: found, counted once, or taken out again.
--@include task facts pools groups

-- Take entries that the task does not count out of the stream and the pools.
local function take_out(seqs)
  for _, seq in ipairs(seqs) do
    local member = member_of(seq)
    local facts = facts_of(member)
    for _, group in ipairs(facts and groups() or {}) do
      local pool = waits_in(group, seq)
      if pool then
        withdraw(group, pool, {member}, {facts})
      end
    end
    redis.call('HDEL', key('facts'), member)
    redis.call('XDEL', stream, id_of(seq))
  end
end

-- The id before the first of the `count` entries that this transaction has added, where entries lie
-- between these and `last`, the last id that the task counts. They are of a transaction whose script
-- failed or was unknown to the server: they were never counted, and are removed.
local function find_added(last, count)
  local added = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', count)
  local before = seq_of(added[count][1]) - 1
  local from = '(' .. id_of(last)
  while true do
    local page, orphans = redis.call('XRANGE', stream, from, id_of(before), 'COUNT', 100), {}
    for i, entry in ipairs(page) do
      orphans[i] = seq_of(entry[1])
    end
    take_out(orphans)
    if #page < 100 then
      return before
    end
  end
end

-- Take out the `count` entries beyond the id `before`; later ids count on behind them.
local function undo(before, count)
  local seqs = {}
  for i = 1, count do
    seqs[i] = before + i
  end
  take_out(seqs)
  redis.call('HSET', puts, 'last', string.format('%d', before + count))
end
