-- Rebuild the record of a task's puts, after its key or a part of it was lost or damaged. The last id is the
-- one that the stream has given last, once entries of failed puts are removed: only groups have facts. The
-- number of groups comes from ledgers; samples and bytes are counted anew. If the records of producers are
-- lost, puts that were under way are not recognized, so the epoch is one that none of them names.
-- KEYS[1] stream
-- Returns the reply of the call `RebuildPuts` of redrb/watch/doctor/calls.py
--@include task put_record puts unrecorded ledger pending permissions

if not exists() or not fault_of_puts() then
  return cmsgpack.pack({found = 0})
end
check_permissions(stream)
if not last_given() then
  return cmsgpack.pack({refused = 'stream'})
end

-- The newest entries, up to the first one that has facts, a page at most; and whether these are all.
local function newest_without_facts()
  local seqs, read, at = {}, 0, '+'
  while #seqs < PAGE.orphans and read < PAGE.copied_bytes do -- bound: PAGE.orphans
    local entry = redis.call('XREVRANGE', stream, at, '-', 'COUNT', 1)[1]
    if not entry or redis.call('HEXISTS', key('facts'), member_of(seq_of(entry[1]))) == 1 then
      return seqs, true
    end
    seqs[#seqs + 1], read, at = seq_of(entry[1]), read + size_of(entry), '(' .. entry[1]
  end
  return seqs, false
end

local orphans, all = newest_without_facts()
-- bound: consumer groups
local unnamed = redis.call('EXISTS', key('facts')) == 0 and #redis.call('XINFO', 'GROUPS', stream) == 0
if groups_among(orphans) > 0 or #orphans > 0 and unnamed then
  return cmsgpack.pack({refused = 'groups'})
end
begin_writing()
take_out(orphans)
if not all then
  return cmsgpack.pack({more = true, found = #orphans})
end
local known = redis.call('HMGET', puts, unpack(PUT_COUNTERS))
if not known[2] then
  redis.call('DEL', puts)
  redis.call('HSET', puts, 'epoch', string.format('%.0f', server_ms() / 1000))
end
for i = 3, #PUT_COUNTERS do -- bound: counters of puts
  if known[i] and not counter(known[i]) then
    redis.call('HDEL', puts, PUT_COUNTERS[i])
  end
end
if not counter(known[2]) then
  redis.call('HDEL', puts, 'put')
  local put = redis.call('HLEN', key('facts'))
  for _, group in ipairs(groups()) do
    if redis.call('EXISTS', key('joining', group)) == 0 then
      local ledger = ledger_of(group)
      local ended = count_leased(group) - ledger.put
      for _, fate in ipairs({'waiting', 'acked', 'expired', 'filtered', 'evicted', 'dead'}) do
        ended = ended + (ledger[fate] or 0)
      end
      put = math.max(put, ended)
    end
  end
  redis.call('HSET', puts, 'put', string.format('%d', put))
end
redis.call('HSET', puts, 'last', string.format('%d', last_given()))
return cmsgpack.pack({found = #orphans})
