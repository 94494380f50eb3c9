-- Counts the entries that a transaction has added to the stream, or takes them out again.
--@include task

-- Delete the `count` entries beyond the id `before`; later ids count on behind them.
local function undo(before, count)
  for seq = before + 1, before + count do
    redis.call('XDEL', stream, id_of(seq))
  end
  redis.call('HSET', task, 'last', string.format('%.0f', before + count))
end

-- The reply that says what an earlier attempt of the producer's operation has stored; nil if nothing.
local function done_before(producer, operation)
  local earlier = redis.call('HGET', key('producers'), producer)
  if earlier then
    local done, at, entries = string.match(earlier, '^(%d+) (%d+) (%d+)$')
    if tonumber(done) >= operation then
      return {'again', tonumber(at), tonumber(entries)}
    end
  end
  return nil
end

-- Count a put that is stored; `known` are the counters put, samples_put and bytes_put until now.
local function count_put(producer, operation, last, count, known, samples, bytes, filtered)
  redis.call('HSET', key('producers'), producer,
    string.format('%.0f %.0f %.0f', operation, last, count))
  redis.call('HSET', task, 'last', string.format('%.0f', last),
    'put', string.format('%.0f', known[1] + count),
    'samples_put', string.format('%.0f', known[2] + samples),
    'bytes_put', string.format('%.0f', known[3] + bytes))
  add(task, 'filtered', filtered)
end
