-- Rebuild the record of a task's puts, whose key was lost: the last id from the facts, which only groups
-- have, and the number of groups from the ledgers. Samples and bytes are counted anew. Puts that were under
-- way are not recognized, so the epoch is one that none of them names.
-- KEYS[1] stream
-- Returns {'more' | 'done', entries of failed puts removed}; with 'more', run it again
--@include task puts uncounted ledger pending permissions

if not exists() or redis.call('HEXISTS', puts, 'last') == 1 then
  return {'done', 0}
end
check_permissions(stream)
begin_writing()
local last, orphans, read = nil, {}, 0
while not last and #orphans < PAGE.orphans and read < PAGE.copied_bytes do -- bound: PAGE.orphans
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  local seq = newest and seq_of(newest[1]) or 0
  if not newest or redis.call('HEXISTS', key('facts'), member_of(seq)) == 1 then
    last = seq
  else
    orphans[#orphans + 1] = seq
    read = read + size_of(newest)
    take_out({seq})
  end
end
if not last then
  return {'more', #orphans}
end
local put = redis.call('HLEN', key('facts'))
redis.call('DEL', puts)
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
redis.call('HSET', puts, 'last', string.format('%d', last), 'put', string.format('%d', put),
  'epoch', string.format('%.0f', server_ms() / 1000))
return {'done', #orphans}
