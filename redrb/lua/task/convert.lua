-- Make a plain task ready to become an indexed one, a page at a time: the caller repeats.
-- KEYS[1] stream
-- Returns 'more' | 'done'
--@include task facts room convert

begin_writing()
if not exists() or rules().indexed then
  return 'done'
end
return convert(groups()) and 'more' or 'done'
